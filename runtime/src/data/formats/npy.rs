//! Parses the header of a `.npy` file, a Python dictionary that describes the array.
//!
//! Source: numpy.lib.format.

/// The fields of a header.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// NumPy's name of the element type, or the description of a record.
    pub(super) descr: String,
    pub(super) fortran_order: bool,
    pub(super) shape: Vec<usize>,
    /// Offset of the elements.
    pub(super) data: usize,
}

/// Parses the header of an array; `None` if there is none.
pub(super) fn header(bytes: &[u8]) -> Option<Header> {
    let (version, rest) = bytes.strip_prefix(b"\x93NUMPY")?.split_first_chunk::<2>()?;
    let (length, rest) = match version[0] {
        1 => rest.split_first_chunk::<2>().map(|(n, rest)| (u16::from_le_bytes(*n).into(), rest)),
        2 | 3 => rest.split_first_chunk::<4>().map(|(n, rest)| (u32::from_le_bytes(*n), rest)),
        _ => None,
    }?;
    let (text, data) = rest.split_at_checked(length.try_into().ok()?)?;
    let text = std::str::from_utf8(text).ok()?;
    let descr = value(text, "descr")?;
    let descr = match descr.chars().next()? {
        quote @ ('\'' | '"') => descr[1..].split(quote).next()?,
        _ => descr.split(", 'fortran_order'").next()?,
    };
    let fortran_order = match value(text, "fortran_order")? {
        v if v.starts_with("True") => true,
        v if v.starts_with("False") => false,
        _ => return None,
    };
    let (sizes, _) = value(text, "shape")?.strip_prefix('(')?.split_once(')')?;
    let sizes = sizes.split(',').map(str::trim).filter(|size| !size.is_empty());
    let shape = sizes.map(|size| size.parse().ok()).collect::<Option<Vec<usize>>>()?;
    Some(Header { descr: descr.into(), fortran_order, shape, data: bytes.len() - data.len() })
}

/// The text from the value of a key on.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("'{key}'"))?;
    Some(rest.trim_start().strip_prefix(':')?.trim_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(version: u8, dictionary: &str) -> Vec<u8> {
        let length = match version {
            1 => (dictionary.len() as u16).to_le_bytes().to_vec(),
            _ => (dictionary.len() as u32).to_le_bytes().to_vec(),
        };
        [b"\x93NUMPY", &[version, 0][..], &length, dictionary.as_bytes(), b"elements"].concat()
    }

    #[test]
    fn what_numpy_writes_is_read() {
        for (dictionary, descr, fortran_order, shape) in [
            (
                "{'descr': '<f4', 'fortran_order': False, 'shape': (8, 3), }  \n",
                "<f4",
                false,
                &[8, 3][..],
            ),
            ("{'descr': '|u1', 'fortran_order': True, 'shape': (), }\n", "|u1", true, &[]),
            ("{'shape': (5,), 'fortran_order': False, 'descr': \"<i8\"}\n", "<i8", false, &[5]),
            (
                "{'descr': [('a', '<f4'), ('b', '<i2')], 'fortran_order': False, 'shape': (2,), }\n",
                "[('a', '<f4'), ('b', '<i2')]",
                false,
                &[2],
            ),
        ] {
            for version in [1, 2, 3] {
                let bytes = file(version, dictionary);
                let data = bytes.len() - b"elements".len();
                let shape = shape.to_vec();
                let expected = Header { descr: descr.into(), fortran_order, shape, data };
                assert_eq!(header(&bytes), Some(expected), "{dictionary}");
            }
        }
    }

    #[test]
    fn anything_else_is_no_header() {
        let good = "{'descr': '<f4', 'fortran_order': False, 'shape': (8, 3), }\n";
        assert!(header(&file(1, good)).is_some() && header(&file(4, good)).is_none());
        for (part, other) in [
            ("descr", "desk"),
            ("False", "0"),
            ("(8", "8"),
            ("8", "-8"),
            ("8", "18446744073709551616"),
            ("3)", "3"),
        ] {
            assert_eq!(header(&file(1, &good.replace(part, other))), None, "{part} is {other}");
        }
        let whole = file(1, good);
        (0..whole.len() - 8).for_each(|n| assert_eq!(header(&whole[..n]), None, "{n} bytes"));
    }
}
