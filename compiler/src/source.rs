//! The copy of the model in a plan: `source/model.onnx` (of an archive of PyTorch, what it is rewritten as) without the data of parameters, which the weights contain, and of other
//! tensors over 1 MiB (or `model.json` unchanged), `source/train.toml`, and `source/origin.json` with the path, the digest, the
//! binds, which initializers are copies of a parameter, and the digests of external data files.

use crate::diagnostics::Report;
use crate::import::mapped::Folder;
use crate::import::{self, Tied};
use crate::wire;
use frit_ir::plan::{layout, sha256_hex};
use frit_ir::{Code, Diagnostic};
use frit_passes::adapter::{self, Adapted};
use serde::Deserialize;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Larger fields of a parameter's tensor are left out.
const LARGEST_PARAMETER: usize = 1 << 10;
/// Larger fields of any other tensor are left out.
const LARGEST_OTHER: usize = 1 << 20;

/// The model and where it came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// File name within `source/`.
    pub file: String,
    /// Its contents.
    pub model: Vec<u8>,
    /// `origin.json`.
    pub origin: String,
}

impl Source {
    /// Reads the model file again and strips it; `parameters` are in the weights. External data may lie anywhere if
    /// `anywhere`.
    ///
    /// # Errors
    /// If the file cannot be read any more.
    pub fn of(
        path: &Path,
        binds: &BTreeMap<String, usize>,
        (ties, adapters): (&BTreeMap<String, Tied>, &BTreeMap<String, Adapted>),
        parameters: &BTreeSet<&str>,
        anywhere: bool,
    ) -> Result<Source, Diagnostic> {
        let bytes = import::mapped::map(path).map_err(|e| {
            Diagnostic::error(
                Code::ModelUnreadable,
                format!("cannot read the model {}: {e}", path.display()),
            )
        })?;
        let is_json = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json"));
        let mut digests = BTreeMap::new();
        let (file, model) = if is_json {
            (layout::JSON_MODEL, bytes.to_vec())
        } else {
            let onnx = import::as_onnx(bytes.clone(), path).map_err(first)?;
            let merged = import::onnx::merged(onnx.clone());
            let tied = ties.iter().filter(|(_, t)| parameters.contains(t.parameter.as_str()));
            let mut stored: BTreeSet<&str> = tied.map(|(name, _)| name.as_str()).collect();
            stored.extend(parameters);
            // Data that stand for several names are needed as long as one of these is no parameter.
            for (name, source) in &merged {
                if !parameters.contains(name.as_str()) {
                    stored.remove(source.as_str());
                }
            }
            let folder = Folder::of(path, anywhere);
            let mut strip = Strip { stored, folder, digests: &mut digests };
            let stripped = strip.message(&onnx, Message::Model);
            (layout::ONNX_MODEL, stripped.unwrap_or_else(|| onnx.to_vec()))
        };
        let origin = json!({
            "path": std::path::absolute(path).unwrap_or_else(|_| path.into()),
            "sha256": sha256_hex(&bytes),
            "binds": binds,
            "allow_external_data": anywhere,
            "ties": ties,
            "digests": digests,
            "adapters": adapters,
        });
        Ok(Source { file: file.into(), model, origin: format!("{origin:#}\n") })
    }

    /// Reads it from the folder `source` of a plan.
    ///
    /// # Errors
    /// If it is not there, or not readable.
    pub fn read(folder: &Path) -> Result<Source, Diagnostic> {
        let is_json = folder.join(layout::JSON_MODEL).exists();
        let file = if is_json { layout::JSON_MODEL } else { layout::ONNX_MODEL };
        let read = |file: &str| {
            let path = folder.join(file);
            std::fs::read(&path).map_err(|e| refused(&path, &e))
        };
        let origin = String::from_utf8_lossy(&read(layout::ORIGIN)?).into_owned();
        Ok(Source { file: file.into(), model: read(file)?, origin })
    }

    /// The files that differ from those of another, but for where the model lies.
    pub fn differences(&self, other: &Source) -> Vec<String> {
        let origin = |source: &Source| serde_json::from_str::<Origin>(&source.origin).ok();
        let same_origin = origin(self).zip(origin(other)).is_some_and(|(a, b)| a.says_the_same(&b));
        let same_model = (&self.file, &self.model) == (&other.file, &other.model);
        let files = [(same_model, self.file.as_str()), (same_origin, layout::ORIGIN)];
        let different = files.into_iter().filter(|(same, _)| !same);
        different.map(|(_, file)| format!("{}/{file}", layout::SOURCE)).collect()
    }
}

/// That a file in the folder `source` is of no use.
fn refused(file: &Path, why: &dyn Display) -> Diagnostic {
    Diagnostic::error(Code::ExportSource, format!("{}: {why}", file.display()))
}

/// The first message; the model was read already, and there is none unless the file was changed.
fn first(report: Report) -> Diagnostic {
    let mut all = report.diagnostics.into_iter();
    all.next().unwrap_or_else(|| Diagnostic::error(Code::ModelUnreadable, "the model was changed"))
}

/// What `source/origin.json` says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Origin {
    /// The model file.
    pub path: PathBuf,
    /// Its digest.
    pub sha256: String,
    /// Values of symbolic dimensions.
    pub binds: BTreeMap<String, usize>,
    /// Whether its external data may lie anywhere.
    #[serde(default)]
    pub allow_external_data: bool,
    /// Initializers that are copies of a parameter.
    pub ties: BTreeMap<String, Tied>,
    /// SHA-256 of the data of initializers that are no parameters and lie in files beside the model.
    #[serde(default)]
    pub digests: BTreeMap<String, String>,
    /// Weights with an adapter.
    #[serde(default)]
    pub adapters: BTreeMap<String, Adapted>,
}

impl Origin {
    /// Whether both say the same of a model, wherever it lies.
    pub(crate) fn says_the_same(&self, other: &Origin) -> bool {
        let elsewhere = Origin {
            path: self.path.clone(),
            sha256: self.sha256.clone(),
            allow_external_data: self.allow_external_data,
            ..other.clone()
        };
        *self == elsewhere
    }

    /// Names of the matrices of all adapters.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = String> {
        self.adapters.keys().flat_map(|weight| adapter::names(weight))
    }

    /// Reads it from the folder `source` of a plan or checkpoint.
    ///
    /// # Errors
    /// If it is not there, or not readable.
    pub fn read(source: &Path) -> Result<Origin, Diagnostic> {
        let file = source.join(layout::ORIGIN);
        let text = std::fs::read_to_string(&file).map_err(|e| refused(&file, &e))?;
        serde_json::from_str(&text).map_err(|e| refused(&file, &e))
    }

    /// The file that the model was read from, or where it is now if that is `given`: the original, or if none is given the copy of a
    /// JSON model, which is whole.
    ///
    /// # Errors
    /// If the file is gone, or is not the one that the plan was compiled from.
    pub fn model(&self, source: &Path, given: Option<&Path>) -> Result<PathBuf, Diagnostic> {
        let copy = source.join(layout::JSON_MODEL);
        let path = given.unwrap_or(if copy.exists() { &copy } else { &self.path });
        let refuse = |e: String| {
            refused(path, &e).help(
                "name the file that the plan was compiled from with --model, or compile it again",
            )
        };
        let bytes = import::mapped::map(path).map_err(|e| refuse(e.to_string()))?;
        if sha256_hex(&bytes) != self.sha256 {
            let what = match given {
                Some(_) => "is not the model that the plan was compiled from",
                None => "was changed since the plan was compiled",
            };
            return Err(refuse(what.into()));
        }
        Ok(path.into())
    }
}

/// The messages of ONNX on the way to its tensors.
#[derive(Clone, Copy, PartialEq)]
enum Message {
    Model,
    /// The model's own graph, whose initializers may be parameters.
    Main,
    Graph,
    Node,
    Attribute,
    Initializer,
    Tensor,
}

impl Message {
    /// The message in a field, if it may hold a tensor. Source: the field numbers of onnx.proto.
    fn inside(self, field: u64) -> Option<Message> {
        match (self, field) {
            (Message::Model, 7) => Some(Message::Main),
            (Message::Main | Message::Graph, 1) => Some(Message::Node),
            (Message::Main, 5) => Some(Message::Initializer),
            (Message::Graph, 5) => Some(Message::Tensor),
            (Message::Node, 5) => Some(Message::Attribute),
            (Message::Attribute, 5 | 10) => Some(Message::Tensor),
            (Message::Attribute, 6 | 11) => Some(Message::Graph),
            _ => None,
        }
    }
}

/// Leaves large data out.
struct Strip<'a> {
    /// Initializers whose data are elsewhere.
    stored: BTreeSet<&'a str>,
    /// Where the model lies.
    folder: Folder,
    digests: &'a mut BTreeMap<String, String>,
}

impl Strip<'_> {
    /// The message without the large fields of its tensors; `None` if the bytes are no message.
    fn message(&mut self, bytes: &[u8], message: Message) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(bytes.len().min(1 << 20));
        for field in wire::fields(bytes)? {
            match (field.content, message.inside(field.number)) {
                (Some(content), Some(Message::Initializer)) => {
                    wire::put(&mut out, field.number, &self.initializer(content)?);
                }
                (Some(content), Some(Message::Tensor)) => {
                    wire::put(&mut out, field.number, &tensor(content, LARGEST_OTHER)?);
                }
                (Some(content), Some(inner)) => {
                    wire::put(&mut out, field.number, &self.message(content, inner)?);
                }
                _ => out.extend_from_slice(field.whole),
            }
        }
        Some(out)
    }

    fn initializer(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        let name = wire::text(bytes, 8)?;
        if self.stored.contains(name.as_str()) {
            return tensor(bytes, LARGEST_PARAMETER);
        }
        // What is beside the model may get lost: it comes along if it is small, and is known again if it is not.
        match import::onnx::external_data(bytes, &self.folder) {
            Some(Ok(data)) => {
                self.digests.insert(name, sha256_hex(&data));
                let small = data.len() <= LARGEST_OTHER;
                if small { wire::embedded(bytes, &data) } else { Some(bytes.to_vec()) }
            }
            _ => tensor(bytes, LARGEST_OTHER),
        }
    }
}

/// The tensor without data over `largest` bytes. All data are length-delimited; sizes are field 1 and the name 8.
fn tensor(bytes: &[u8], largest: usize) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(bytes.len().min(largest));
    for field in wire::fields(bytes)? {
        let large = field.content.is_some_and(|c| c.len() > largest);
        if !large || matches!(field.number, 1 | 8) {
            out.extend_from_slice(field.whole);
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(number: u64, content: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        wire::put(&mut out, number, content);
        out
    }

    fn strip(bytes: &[u8], stored: &[&str]) -> Option<Vec<u8>> {
        let (stored, mut digests) = (stored.iter().copied().collect(), BTreeMap::new());
        let folder = Folder::default();
        let mut strip = Strip { stored, folder, digests: &mut digests };
        strip.message(bytes, Message::Model)
    }

    #[test]
    fn large_data_goes_and_everything_else_stays() {
        let tensor =
            |name: &str, n: usize| [field(8, name.as_bytes()), field(9, &vec![7; n])].concat();
        let graph = |w: usize, m: usize| {
            let initializers = [field(5, &tensor("w", w)), field(5, &tensor("m", m))].concat();
            field(7, &[field(2, b"g"), initializers].concat())
        };
        let (parameter, other) = (LARGEST_PARAMETER, LARGEST_OTHER);
        let small = graph(parameter, other);
        assert_eq!(strip(&small, &["w"]), Some(small));
        let without = |name: &[u8]| field(5, &field(8, name));
        let both = field(7, &[field(2, b"g"), without(b"w"), without(b"m")].concat());
        assert_eq!(strip(&graph(parameter + 1, other + 1), &["w"]), Some(both));
        // What is no parameter is not in the weights.
        let large = graph(parameter + 1, 8);
        assert_eq!(strip(&large, &[]), Some(large));
    }

    #[test]
    fn what_is_no_message_is_refused() {
        assert_eq!(strip(&[0xff; 30], &[]), None);
        assert_eq!(strip(&field(7, b"abc")[..3], &[]), None);
    }
}
