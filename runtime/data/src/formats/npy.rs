//! `.npy`: one array, memory-mapped, with a header that is a Python dictionary. Source: numpy.lib.format.
//!
//! A vector of integers is a sequence of tokens if the plan takes tokens; any other array is the input of the file's name. A folder holds
//! one file per input.

use super::super::bytes::Bytes;
use super::super::element::Element;
use super::tokens::Inputs;
use super::{Array, Contents};
use crate::DataError;
use frit_ir::plan::Plan;
use std::path::{Path, PathBuf};

/// NumPy's names of element types.
const TYPES: [(&str, Element); 12] = [
    ("<f8", Element::F64),
    ("<f4", Element::F32),
    ("<f2", Element::F16),
    ("<i8", Element::I64),
    ("<i4", Element::I32),
    ("<i2", Element::I16),
    ("|i1", Element::I8),
    ("<u8", Element::U64),
    ("<u4", Element::U32),
    ("<u2", Element::U16),
    ("|u1", Element::U8),
    ("|b1", Element::Bool),
];

/// Reads a file.
///
/// # Errors
/// If it cannot be read, or is no array in C order.
pub(crate) fn read(path: &Path, plan: &Plan) -> Result<Contents, DataError> {
    let (mut contents, name) = (Contents::default(), stem(path));
    add(&mut contents, &name, &Bytes::map(path)?)
        .map_err(|reason| DataError::content(path, reason))?;
    match contents.arrays.get(&name) {
        Some(Array { element, shape, bytes, .. })
            if shape.len() == 1
                && element.is_integer()
                && plan.inputs.iter().all(|input| input.name != name) =>
        {
            let inputs = Inputs::of(plan).map_err(|reason| DataError::content(path, reason))?;
            Ok(inputs.windows(*element, bytes))
        }
        _ => Ok(contents),
    }
}

/// Reads a folder of files, each named after an input.
///
/// # Errors
/// As [`read`], or if the folder has none.
pub(crate) fn read_folder(folder: &Path) -> Result<Contents, DataError> {
    let mut contents = Contents::default();
    for path in files(folder)? {
        add(&mut contents, &stem(&path), &Bytes::map(&path)?)
            .map_err(|reason| DataError::content(&path, reason))?;
    }
    Ok(contents)
}

/// The `.npy` files of a folder, sorted by name.
fn files(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let entries = std::fs::read_dir(folder).map_err(DataError::io(folder))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(DataError::io(folder))?.path();
        if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("npy")) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Adds the array of a file under a name.
///
/// # Errors
/// If it has no known header, is in Fortran order or is not complete.
pub(crate) fn add(contents: &mut Contents, name: &str, file: &Bytes) -> Result<(), String> {
    let Some(Header { descr, fortran_order, shape, data }) = header(file) else {
        return Err(format!("array `{name}` has no known header"));
    };
    let Some((_, element)) = TYPES.iter().find(|(name, _)| *name == descr) else {
        contents.others.insert(name.into(), descr);
        return Ok(());
    };
    if fortran_order && shape.len() > 1 {
        return Err(format!("array `{name}` is in Fortran order; save it in C order"));
    }
    let numel = shape.iter().try_fold(element.size(), |n, d| n.checked_mul(*d));
    let end = numel.and_then(|n| data.checked_add(n));
    let bytes = end.and_then(|end| file.part(data..end));
    let bytes =
        bytes.ok_or_else(|| format!("array `{name}` is shorter than its shape {shape:?}"))?;
    contents.arrays.insert(name.into(), Array::new(*element, shape, bytes));
    Ok(())
}

/// The fields of a header.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// NumPy's name of the element type, or the description of a record.
    pub(crate) descr: String,
    pub(crate) fortran_order: bool,
    pub(crate) shape: Vec<usize>,
    /// Offset of the elements.
    pub(crate) data: usize,
}

/// Parses the header of an array; `None` if there is none.
pub(crate) fn header(bytes: &[u8]) -> Option<Header> {
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
