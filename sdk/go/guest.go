//go:build wasip1

package torpor

import (
	crypto "crypto/rand"
	"encoding/binary"
	"fmt"
	"math/rand"
	"os"
	"runtime/debug"
	"strconv"
	"time"
	"unsafe"
)

var (
	operator Operator
	// The buffers of the call under way: referenced here, the collector leaves them to the host.
	input, reply []byte
)

// Register names the operator of this module. Call it from an init function, once.
func Register(o Operator) {
	if o.Reconcile == nil || (o.Manifest == "") == (o.Describe == nil) {
		panic("torpor.Register: Reconcile and one of Manifest and Describe are needed")
	}
	if len(os.Args) == 0 {
		os.Args = []string{"operator"} // libraries read it in their init functions
	}
	operator = o
}

// Kube sends a request to the Kubernetes API and waits for the answer.
func Kube(request KubeRequest) (Response, error) {
	timeout := ""
	if request.Timeout > 0 {
		timeout = strconv.FormatInt(max(1, request.Timeout.Milliseconds()), 10)
	}
	message := encode([]byte(request.Method), []byte(request.Path), []byte(orJSON(request.Accept)),
		[]byte(orJSON(request.ContentType)), request.Body, []byte(timeout))
	answer, err := take(kubeRequest(unsafe.Pointer(unsafe.SliceData(message)), uint32(len(message))))
	if err != nil {
		return Response{}, err
	}
	status, contentType, body := answer.text(), answer.text(), answer.next()
	if code := answer.text(); code != "" {
		return Response{}, &CallError{code, answer.text()}
	}
	number, err := strconv.Atoi(status)
	if err != nil {
		return Response{}, &CallError{"invalid", "the host sent no status"}
	}
	return Response{number, contentType, body}, nil
}

// Config is {"config": {…}, "env": {…}} as JSON, as they are now.
func Config() ([]byte, error) {
	return take(hostConfig())
}

// Log writes a line to the operator's log.
func Log(level Level, line string) {
	hostLog(int32(level), unsafe.Pointer(unsafe.StringData(line)), uint32(len(line)))
}

func orJSON(mediaType string) string {
	if mediaType == "" {
		return "application/json"
	}
	return mediaType
}

// take fetches the pending result whose length a call returned.
func take(length int32) (fields, error) {
	if length < 0 {
		return nil, &CallError{"invalid", "the host refused the call"}
	}
	buffer := make([]byte, length)
	if hostTake(unsafe.Pointer(unsafe.SliceData(buffer)), uint32(length)) != length {
		return nil, &CallError{"invalid", "the host held no result"}
	}
	return buffer, nil
}

//go:wasmimport torpor kube_request
func kubeRequest(ptr unsafe.Pointer, length uint32) int32

//go:wasmimport torpor config
func hostConfig() int32

//go:wasmimport torpor log
func hostLog(level int32, ptr unsafe.Pointer, length uint32)

//go:wasmimport torpor take
func hostTake(ptr unsafe.Pointer, length uint32) int32

//go:wasmexport torpor_abi_version
func abiVersion() int32 { return 1 }

//go:wasmexport torpor_alloc
func alloc(length uint32) unsafe.Pointer {
	input = make([]byte, max(1, length))
	return unsafe.Pointer(unsafe.SliceData(input))
}

//go:wasmexport torpor_describe
func describe() int64 {
	manifest, err := guarded(func() (string, error) {
		if operator.Reconcile == nil {
			return "", fmt.Errorf("no operator is registered: call torpor.Register from an init function")
		}
		if operator.Describe != nil {
			return operator.Describe()
		}
		return operator.Manifest, nil
	})
	debug.FreeOSMemory() // what initialisation left behind would be copied at the first collection after each wake
	if err != nil {
		return send(encode([]byte(err.Error())))
	}
	return send(encode(nil, []byte(manifest)))
}

//go:wasmexport torpor_reconcile
func reconcile(_ unsafe.Pointer, length uint32) int64 {
	message := fields(input[:length])
	request := Request{Namespace: message.text(), Name: message.text(), Cause: message.text()}
	request.Attempt, _ = strconv.Atoi(message.text())
	request.Traceparent = message.text()
	result, err := guarded(func() (Result, error) { return operator.Reconcile(request) })
	switch {
	case err != nil:
		return send(encode([]byte("error"), nil, []byte(err.Error())))
	case result.RequeueAfter > 0:
		milliseconds := strconv.FormatInt(max(1, result.RequeueAfter.Milliseconds()), 10)
		return send(encode([]byte("requeue"), []byte(milliseconds)))
	default:
		return send(encode([]byte("done")))
	}
}

//go:wasmexport torpor_wake
func wake() {
	var seed [8]byte
	_, _ = crypto.Read(seed[:])
	rand.Seed(int64(binary.LittleEndian.Uint64(seed[:])) ^ time.Now().UnixNano()) //nolint:staticcheck // the image repeats it
	if operator.Wake != nil {
		operator.Wake()
	}
}

func send(message []byte) int64 {
	reply = message
	return int64(uint64(uintptr(unsafe.Pointer(unsafe.SliceData(reply))))<<32 | uint64(len(reply)))
}

// guarded turns a panic into an error, as controller-runtime does by default.
func guarded[T any](call func() (T, error)) (result T, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("panic: %v\n%s", cause, debug.Stack())
		}
	}()
	return call()
}
