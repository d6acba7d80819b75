//! `.npz`: named NumPy arrays, memory-mapped if stored uncompressed (`numpy.savez`), otherwise unpacked into memory
//! (`numpy.savez_compressed`).

use super::super::bytes::Bytes;
use super::super::element::Element;
use super::npy::{Header, header};
use super::{Array, Contents};
use crate::RunError;
use npyz::npz::NpzArchive;
use npyz::zip::CompressionMethod;
use std::io::{Cursor, Read};
use std::path::Path;

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

pub(super) fn read(path: &Path) -> Result<Contents, RunError> {
    let whole = Bytes::map(path)?;
    let refuse = |e: std::io::Error| RunError::data(path, format!("not an npz file: {e}"));
    let mut archive = NpzArchive::new(Cursor::new(&*whole)).map_err(refuse)?;
    let names: Vec<String> = archive.array_names().map(str::to_string).collect();
    let mut contents = Contents::default();
    let mut packed = 0_u64;
    for name in names {
        let file = npyz::npz::file_name_from_array_name(&name);
        let zip = archive.zip_archive();
        let mut entry = zip.by_name(&file).map_err(|e| refuse(e.into()))?;
        packed = packed.saturating_add(entry.compressed_size());
        if packed > whole.len() as u64 {
            // Otherwise a small file could expand to any size.
            return Err(RunError::data(path, "not an npz file: its arrays overlap"));
        }
        let is_stored = entry.compression() == CompressionMethod::Stored;
        let (begin, size) = (entry.data_start() as usize, entry.size() as usize);
        let stored = is_stored.then(|| whole.part(begin..begin.checked_add(size)?)).flatten();
        let bytes = match stored {
            Some(bytes) => bytes,
            None => {
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes).map_err(refuse)?;
                Bytes::from(bytes)
            }
        };
        let Some(Header { descr, fortran_order, shape, data }) = header(&bytes) else {
            return Err(RunError::data(path, format!("array `{name}` has no known header")));
        };
        let Some((_, element)) = TYPES.iter().find(|(name, _)| *name == descr) else {
            contents.others.insert(name, descr);
            continue;
        };
        if fortran_order && shape.len() > 1 {
            let reason = format!("array `{name}` is in Fortran order; save it in C order");
            return Err(RunError::data(path, reason));
        }
        let numel = shape.iter().try_fold(element.size(), |n, d| n.checked_mul(*d));
        let end = numel.and_then(|n| data.checked_add(n));
        let bytes = end.and_then(|end| bytes.part(data..end)).ok_or_else(|| {
            RunError::data(path, format!("array `{name}` is shorter than its shape {shape:?}"))
        })?;
        contents.arrays.insert(name, Array { element: *element, shape, bytes });
    }
    Ok(contents)
}
