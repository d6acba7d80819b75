//! Files read through memory mappings, shared as byte slices.

use memmap2::Mmap;
use prost::bytes::Bytes;
use std::fs::File;
use std::io;
use std::path::Path;

/// The bytes of a file, mapped into memory. Slices of the result keep the mapping alive.
///
/// # Errors
/// If the file cannot be opened or mapped, or is not a regular file.
pub(crate) fn map(path: &Path) -> io::Result<Bytes> {
    let file = File::open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    if meta.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the mapping is private and read-only, and outlives every slice of it. As with every
    // mapping, another process that truncates the file while Frit reads it makes the read fail.
    let mapping = unsafe { Mmap::map(&file)? };
    Ok(Bytes::from_owner(mapping))
}
