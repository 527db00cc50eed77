package torpor

import "encoding/binary"

// encode makes a message: each field its length (uint32, little-endian) and its bytes.
func encode(fields ...[]byte) []byte {
	size := 0
	for _, field := range fields {
		size += 4 + len(field)
	}
	message := make([]byte, 0, size)
	for _, field := range fields {
		message = binary.LittleEndian.AppendUint32(message, uint32(len(field)))
		message = append(message, field...)
	}
	return message
}

// fields reads a message in order; fields missing at the end, or cut off, are empty.
type fields []byte

func (f *fields) next() []byte {
	if len(*f) < 4 {
		return nil
	}
	length := uint64(binary.LittleEndian.Uint32(*f))
	if length > uint64(len(*f)-4) {
		return nil
	}
	field := (*f)[4 : 4+length]
	*f = (*f)[4+length:]
	return field
}

func (f *fields) text() string { return string(f.next()) }
