//! Data file formats: each provides tensors by name.

mod npy;
mod npz;
mod parquet;
mod safetensors;
mod tokens;

pub(crate) use safetensors::stored_dtype;
pub use tokens::TokenDType;

use super::bytes::Bytes;
use super::element::Element;
use crate::DataError;
use frit_ir::plan::Plan;
use std::collections::BTreeMap;
use std::path::Path;

/// A tensor of a file.
pub(crate) struct Array {
    pub(crate) element: Element,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Bytes,
    /// Whether it is one batch, the same in every step, of an input that otherwise has a value for each example.
    pub(crate) is_constant: bool,
}

impl Array {
    pub(crate) fn new(element: Element, shape: Vec<usize>, bytes: Bytes) -> Array {
        Array { element, shape, bytes, is_constant: false }
    }
}

/// The contents of a file.
#[derive(Default)]
pub(crate) struct Contents {
    pub(crate) arrays: BTreeMap<String, Array>,
    /// Tensors of types that no input has, by name, with the type. They may be intended for other programs.
    pub(crate) others: BTreeMap<String, String>,
}

impl Contents {
    /// A tensor.
    ///
    /// # Errors
    /// The tensors that exist instead.
    pub(crate) fn get(&self, name: &str) -> Result<&Array, String> {
        if let Some(array) = self.arrays.get(name) {
            return Ok(array);
        }
        if let Some(kind) = self.others.get(name) {
            return Err(format!("tensor `{name}` is {kind}, which no input has"));
        }
        Err(format!("no tensor `{name}`"))
    }

    /// Whether there is a tensor of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.arrays.contains_key(name) || self.others.contains_key(name)
    }

    /// The tensors, for messages.
    pub(crate) fn list(&self) -> String {
        let shape = |a: &Array| a.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let known = self.arrays.iter().map(|(n, a)| format!("`{n}` {}[{}]", a.element, shape(a)));
        let all: Vec<String> =
            known.chain(self.others.iter().map(|(n, kind)| format!("`{n}` {kind}"))).collect();
        if all.is_empty() { "no tensor".into() } else { all.join(", ") }
    }
}

/// Reads a file in the format of its extension.
///
/// # Errors
/// If it cannot be read, or its content is not of that format.
pub(crate) fn read(
    path: &Path,
    plan: &Plan,
    tokens: Option<TokenDType>,
) -> Result<Contents, DataError> {
    if path.is_dir() {
        return npy::read_folder(path);
    }
    let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase());
    match extension.as_deref() {
        Some("safetensors") => safetensors::read(path),
        Some("npy") => npy::read(path, plan),
        Some("npz") => npz::read(path),
        Some("parquet") => parquet::read(path, plan),
        Some("bin") => tokens::read(path, plan, tokens),
        other => {
            let remedy = remedy(path, other.unwrap_or_default());
            let reason = format!(
                "unknown kind of data; use .safetensors, .parquet, .npz, .npy or .bin{remedy}"
            );
            Err(DataError::content(path, reason))
        }
    }
}

/// How files of other kinds become data.
const REMEDIES: [(&[&str], &str); 4] = [
    (
        &["jsonl", "json", "txt", "text", "md", "gz"],
        "make tokens of text with `frit tokenize --tokenizer tokenizer.json FILE -o shards`, and give 'shards/train-*.bin'",
    ),
    (
        &["csv", "tsv"],
        "in Python, pandas.read_csv(FILE).to_parquet(\"data.parquet\") makes one of columns named after the inputs",
    ),
    (
        &["pt", "pth"],
        "in Python, safetensors.torch.save_file(torch.load(FILE), \"data.safetensors\") makes one of a dict of tensors named \
         after the inputs",
    ),
    (
        &["pkl", "pickle", "h5", "hdf5", "mat", "arrow", "tfrecord"],
        "in Python, numpy.savez(\"data.npz\", INPUT=array, …) makes one of arrays named after the inputs",
    ),
];

/// What to do with a file of this extension, after a separator. What is compressed is told by the extension before that.
fn remedy(path: &Path, extension: &str) -> String {
    let inner = path.file_stem().map(Path::new).and_then(Path::extension);
    let inner = inner.map(|e| e.to_string_lossy().to_lowercase()).filter(|_| extension == "gz");
    let of = |kind: &str| REMEDIES.iter().find(|(kinds, _)| kinds.contains(&kind));
    match inner.as_deref() {
        Some("safetensors" | "npy" | "npz" | "parquet" | "bin") => "; gunzip it".into(),
        inner => {
            let found = inner.and_then(of).or_else(|| of(extension));
            found.map(|(_, remedy)| format!("; {remedy}")).unwrap_or_default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_compressed_has_the_remedy_of_its_content() {
        let of = |name: &str, extension: &str| remedy(Path::new(name), extension);
        assert!(of("train.csv.gz", "gz").contains("read_csv"));
        assert!(of("v1.TSV.gz", "gz").contains("read_csv"));
        assert!(of("text.jsonl.gz", "gz").contains("frit tokenize"));
        assert!(of("text.gz", "gz").contains("frit tokenize"));
        assert_eq!(of("a.npy.gz", "gz"), "; gunzip it");
        assert!(of("gz.csv", "csv").contains("read_csv"));
        assert_eq!(of("a.csv.xyz", "xyz"), "");
    }
}
