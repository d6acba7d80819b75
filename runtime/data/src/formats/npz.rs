//! `.npz`: named NumPy arrays, memory-mapped if stored uncompressed (`numpy.savez`), otherwise unpacked into memory
//! (`numpy.savez_compressed`).

use super::super::bytes::Bytes;
use super::{Contents, npy};
use crate::DataError;
use npyz::npz::NpzArchive;
use npyz::zip::CompressionMethod;
use std::io::{Cursor, Read};
use std::path::Path;

pub(crate) fn read(path: &Path) -> Result<Contents, DataError> {
    let whole = Bytes::map(path)?;
    let refuse = |e: std::io::Error| DataError::content(path, format!("not an npz file: {e}"));
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
            return Err(DataError::content(path, "not an npz file: its arrays overlap"));
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
        npy::add(&mut contents, &name, &bytes)
            .map_err(|reason| DataError::content(path, reason))?;
    }
    Ok(contents)
}
