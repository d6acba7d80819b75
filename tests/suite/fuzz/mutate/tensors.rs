//! Mutations of the content of tensor files: headers and elements, with correct lengths and checksums.

use super::{bytes, change_value};
use crate::machine::Random;
use npyz::zip::write::FileOptions;
use npyz::zip::{ZipArchive, ZipWriter};
use serde_json::Value;
use std::io::{Cursor, Read, Write};

/// Changes the header of a safetensors file; nothing if it has none.
pub(in crate::fuzz) fn change_safetensors(
    random: &mut Random,
    file: &[u8],
    other: &[u8],
) -> Option<Vec<u8>> {
    let (mut header, data) = parts(file)?;
    let other = parts(other).map(|(header, _)| header).unwrap_or_default();
    change_value(random, &mut header, &other, &["F64", "F32", "BF16", "I64", "U8", "BOOL"]);
    let text = header.to_string();
    let length = (text.len() as u64).to_le_bytes();
    Some([&length, text.as_bytes(), data].concat())
}

fn parts(file: &[u8]) -> Option<(Value, &[u8])> {
    let (length, rest) = file.split_first_chunk::<8>()?;
    let (header, data) = rest.split_at_checked(u64::from_le_bytes(*length).try_into().ok()?)?;
    Some((serde_json::from_slice(header).ok()?, data))
}

/// Changes one of the files of an archive, and packs them again; nothing if it is none.
pub(in crate::fuzz) fn change_archive(
    random: &mut Random,
    archive: &[u8],
    other: &[u8],
) -> Option<Vec<u8>> {
    let mut files = unpacked(archive)?;
    let at = random.below(files.len());
    let donor = unpacked(other).and_then(|all| all.into_iter().next()).unwrap_or_default().1;
    let (_, content) = files.get_mut(at)?;
    // Half of the changes are of the header, a text of some hundred bytes.
    let head = content.len().min(if random.below(2) == 0 { 128 } else { usize::MAX });
    let mut changed = content[..head].to_vec();
    bytes::change(random, &mut changed, &donor);
    content.splice(..head, changed);
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in files {
        writer.start_file(name, FileOptions::default()).ok()?;
        writer.write_all(&content).ok()?;
    }
    Some(writer.finish().ok()?.into_inner())
}

fn unpacked(archive: &[u8]) -> Option<Vec<(String, Vec<u8>)>> {
    let mut archive = ZipArchive::new(Cursor::new(archive)).ok()?;
    let mut files = Vec::new();
    for i in 0..archive.len().min(8) {
        let file = archive.by_index(i).ok()?;
        let (name, mut content) = (file.name().to_string(), Vec::new());
        file.take(1 << 20).read_to_end(&mut content).ok()?;
        files.push((name, content));
    }
    (!files.is_empty()).then_some(files)
}
