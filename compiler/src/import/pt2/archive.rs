//! The records of an archive: a zip whose entries are stored, not compressed, so that tensors are slices of the mapped file.

use super::schema::{Payloads, Program};
use frit_ir::{Code, Diagnostic};
use prost::bytes::Bytes;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::io::Cursor;
use std::ops::Range;
use zip::{CompressionMethod, ZipArchive};

/// Where the graph lies, below the root of the archive.
const MODELS: &str = "models/";

/// An archive that holds one model.
pub(super) struct Archive {
    bytes: Bytes,
    /// Places of the records, by their name below the root.
    records: HashMap<String, Range<usize>>,
    /// The name of the model.
    model: String,
}

/// The error for an archive that is damaged, or another kind of file.
pub(super) fn unreadable(what: impl Into<String>) -> Diagnostic {
    let message = format!("the archive cannot be read: {}", what.into());
    Diagnostic::error(Code::ArchiveUnreadable, message)
        .help("save it with `torch.export.save(program, \"model.pt2\")` of PyTorch 2.9 or later")
}

impl Archive {
    /// Reads the directory of the zip.
    ///
    /// # Errors
    /// If it is no archive of one model.
    pub(super) fn open(bytes: Bytes) -> Result<Archive, Diagnostic> {
        let mut zip = ZipArchive::new(Cursor::new(&bytes[..]))
            .map_err(|e| unreadable(format!("it is no complete zip file ({e})")))?;
        let mut entries: Vec<(String, Range<usize>, bool)> = Vec::new();
        for i in 0..zip.len() {
            let entry = zip.by_index_raw(i).map_err(|e| unreadable(e.to_string()))?;
            let stored = entry.compression() == CompressionMethod::Stored;
            let place = usize::try_from(entry.data_start()).ok().and_then(|start| {
                let end = start.checked_add(usize::try_from(entry.compressed_size()).ok()?)?;
                (end <= bytes.len()).then_some(start..end)
            });
            let Some(place) = place else {
                return Err(unreadable(format!("the record `{}` leaves the file", entry.name())));
            };
            entries.push((entry.name().to_string(), place, stored));
        }
        drop(zip);
        let is_model = |name: &str| {
            let (folder, file) = name.rsplit_once('/')?;
            let root = format!("{folder}/").strip_suffix(MODELS)?.to_string();
            Some((root, file.strip_suffix(".json")?.to_string()))
        };
        let mut models = entries.iter().filter_map(|(name, _, _)| is_model(name));
        let (root, model) = match (models.next(), models.next()) {
            (Some(found), None) => found,
            (None, _) => {
                return Err(unreadable("it holds no `models/*.json`, the graph of torch.export"));
            }
            _ => return Err(unreadable("it holds several models")),
        };
        let mut records = HashMap::new();
        for (name, place, stored) in entries {
            let Some(name) = name.strip_prefix(&root) else { continue };
            if !stored {
                return Err(unreadable(format!("the record `{name}` is compressed")));
            }
            records.insert(name.to_string(), place);
        }
        let archive = Archive { bytes, records, model };
        match archive.record("byteorder") {
            Ok(order) if archive.bytes[order.clone()] != *b"little" => {
                Err(unreadable("its tensors are not little-endian"))
            }
            _ => Ok(archive),
        }
    }

    /// The place of a record in the file.
    pub(super) fn record(&self, name: &str) -> Result<Range<usize>, Diagnostic> {
        let place = self.records.get(name).cloned();
        place.ok_or_else(|| unreadable(format!("the record `{name}` is missing")))
    }

    /// The bytes of a place.
    pub(super) fn bytes(&self, place: Range<usize>) -> Bytes {
        self.bytes.slice(place)
    }

    /// The program.
    pub(super) fn program(&self) -> Result<Program, Diagnostic> {
        self.model_json()
    }

    /// The program, or a part of it.
    pub(super) fn model_json<T: DeserializeOwned>(&self) -> Result<T, Diagnostic> {
        self.json(&format!("{MODELS}{}.json", self.model))
    }

    /// Where the tensors of a kind, `weights` or `constants`, lie.
    pub(super) fn payloads(&self, kind: &str) -> Result<Payloads, Diagnostic> {
        let name = format!("data/{kind}/{}_{kind}_config.json", self.model);
        match self.records.contains_key(&name) {
            true => self.json(&name),
            false => Ok(Payloads { config: HashMap::new() }),
        }
    }

    fn json<T: DeserializeOwned>(&self, name: &str) -> Result<T, Diagnostic> {
        let place = self.record(name)?;
        serde_json::from_slice(&self.bytes[place])
            .map_err(|e| unreadable(format!("`{name}` is not what schema version 8 says: {e}")))
    }
}
