//! The Protocol Buffers wire format, for copying ONNX files field by field.

/// One field: its number, its bytes as they stand, and its content if that is length-delimited.
pub(crate) struct Field<'a> {
    pub(crate) number: u64,
    pub(crate) whole: &'a [u8],
    pub(crate) content: Option<&'a [u8]>,
}

/// The fields of a message in order; `None` if the bytes are no message.
pub(crate) fn fields(bytes: &[u8]) -> Option<Vec<Field<'_>>> {
    let mut fields = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        let key = varint(bytes, &mut at)?;
        let mut content = None;
        match key & 7 {
            0 => {
                varint(bytes, &mut at)?;
            }
            1 => at += 8,
            5 => at += 4,
            2 => {
                let len = usize::try_from(varint(bytes, &mut at)?).ok()?;
                content = Some(bytes.get(at..at.checked_add(len)?)?);
                at += len;
            }
            _ => return None,
        }
        fields.push(Field { number: key >> 3, whole: bytes.get(start..at)?, content });
    }
    Some(fields)
}

/// The last text of a message under this number, empty if it has none; `None` if the bytes are no message.
pub(crate) fn text(message: &[u8], number: u64) -> Option<String> {
    let fields = fields(message)?;
    let last = fields.iter().rfind(|f| f.number == number).and_then(|f| f.content);
    Some(String::from_utf8_lossy(last.unwrap_or_default()).into_owned())
}

/// An ONNX tensor whose data lie in another file, with these data inside it; `None` if the bytes are no message.
pub(crate) fn embedded(tensor: &[u8], data: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(tensor.len() + data.len());
    // 13 says where the data lie, 14 that they lie elsewhere.
    for field in fields(tensor)?.iter().filter(|f| !matches!(f.number, 13 | 14)) {
        out.extend_from_slice(field.whole);
    }
    put(&mut out, 9, data);
    Some(out)
}

/// Appends a length-delimited field.
pub(crate) fn put(out: &mut Vec<u8>, number: u64, content: &[u8]) {
    put_varint(out, number << 3 | 2);
    put_varint(out, content.len() as u64);
    out.extend_from_slice(content);
}

/// What stands before the content of a length-delimited field of this size.
pub(crate) fn head(number: u64, len: u64) -> Vec<u8> {
    let mut out = Vec::new();
    put_varint(&mut out, number << 3 | 2);
    put_varint(&mut out, len);
    out
}

/// Appends an integer field.
pub(crate) fn put_integer(out: &mut Vec<u8>, number: u64, value: u64) {
    put_varint(out, number << 3);
    put_varint(out, value);
}

/// The integer that begins at `at`, which moves behind it.
pub(crate) fn varint(bytes: &[u8], at: &mut usize) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.get(*at)?;
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
