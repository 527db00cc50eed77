//! Messages: each field its length (u32, little-endian) and its bytes.

/// A message of these fields.
pub fn encode(fields: &[&[u8]]) -> Vec<u8> {
    let mut message = Vec::with_capacity(fields.iter().map(|field| 4 + field.len()).sum());
    for field in fields {
        message.extend_from_slice(&(field.len() as u32).to_le_bytes());
        message.extend_from_slice(field);
    }
    message
}

/// Reads fields in order; those missing at the end, or cut off, are empty.
pub struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub fn new(message: &'a [u8]) -> Self {
        Self(message)
    }

    pub fn next(&mut self) -> &'a [u8] {
        let Some((head, rest)) = self.0.split_first_chunk::<4>() else { return b"" };
        let length = u32::from_le_bytes(*head) as usize;
        if length > rest.len() {
            return b"";
        }
        let (field, rest) = rest.split_at(length);
        self.0 = rest;
        field
    }

    pub fn text(&mut self) -> String {
        String::from_utf8_lossy(self.next()).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_back_in_order_and_missing_ones_are_empty() {
        let message = encode(&[b"a", b"", b"bc"]);
        let mut fields = Fields::new(&message);
        assert_eq!((fields.next(), fields.next(), fields.next(), fields.next()), (&b"a"[..], &b""[..], &b"bc"[..], &b""[..]));
    }

    #[test]
    fn a_field_that_is_cut_off_is_empty() {
        assert_eq!(Fields::new(&[9, 0, 0, 0, b'a']).next(), b"");
        assert_eq!(Fields::new(&[9, 0]).next(), b"");
    }
}
