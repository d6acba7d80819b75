//! Checkpoints: training state on disk, written atomically, readable on any number of ranks.
//!
//! A directory of checkpoints holds one directory per checkpoint, named after the number of steps run, and
//! the file `latest` with the name of the one to resume from:
//!
//! ```text
//! latest                        step-00000020
//! lock                          the run that writes here
//! best                          step-00000010, the one of the lowest validation loss, if that is known
//! step-00000020/
//!   index.json                  step, data position, and for every tensor its parts: file, range, checksum
//!   rank-00000.safetensors …    what each rank owns; a tensor of the index is stored in parts of the same name
//!   validation.json             the loss over the validation examples, once it was taken
//!   source/                     the model and configuration of the plan
//!   SHA256SUMS                  of index.json and source/, for `sha256sum -c`
//! ```
//!
//! Tensors are logical: `param/NAME`, `adam_m/NAME` … are flat, unpadded and complete when all parts are joined, for any
//! strategy; `state/NAME` are scalars. Parameters that no step changes may be omitted. Only one run at a time uses a
//! directory ([`lock`]); it writes checkpoints while training continues ([`saver`]). [`write`] writes temporary files, syncs
//! and renames them, and updates `latest` last; [`read`] verifies checksums before use; [`restore`] reads the ranges that a
//! rank of any plan owns, one part at a time.

mod export;
pub(crate) mod lock;
pub mod read;
pub(crate) mod restore;
pub(crate) mod saver;
pub(crate) mod snapshot;
mod validated;
mod write;

pub use frit_data::Position;
pub use read::Checkpoint;
pub use validated::{Progress, Validated};

use crate::left_out::AllLeftOut;
use frit_ir::DType;
use frit_ir::plan::Strategy;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Checkpoint options of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointOptions {
    /// The directory of checkpoints.
    pub dir: PathBuf,
    /// Steps between two checkpoints; by default only the last step is saved.
    pub every: Option<usize>,
    /// Continue from the latest checkpoint; from step 0 if there is none.
    pub resume: bool,
    /// Checkpoints to keep; by default all.
    pub keep: Option<usize>,
}

impl CheckpointOptions {
    /// Whether the directory has the file `latest`.
    pub(crate) fn names_latest(&self) -> bool {
        self.dir.join(LATEST).exists()
    }
}

/// Version of the format of `index.json`. Checkpoints of other versions are refused.
pub const FORMAT_VERSION: u32 = 1;

const INDEX: &str = "index.json";
const LATEST: &str = "latest";
const BEST: &str = "best";
const VALIDATED: &str = "validation.json";
const SUMS: &str = "SHA256SUMS";

/// The content of `index.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Index {
    /// Version of this format; see [`FORMAT_VERSION`].
    pub frit_checkpoint: u32,
    /// Name of the model.
    pub model: String,
    /// SHA-256 of the plan that wrote it.
    pub plan_sha256: String,
    /// Its ranks.
    pub world_size: usize,
    /// Its strategy.
    pub strategy: Strategy,
    /// Steps run, skipped ones included.
    pub step: usize,
    /// The position in the data.
    pub position: Position,
    /// The progress of validations before the one after these steps.
    #[serde(default)]
    pub validations: Progress,
    /// Hyper-parameters that were changed when the plan was run.
    pub set: BTreeMap<String, f64>,
    /// Every tensor, by kind and name.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// The parameters that are omitted because no step changes them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_out: AllLeftOut,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Its element type.
    pub dtype: DType,
    /// Its logical shape.
    pub shape: Vec<usize>,
    /// Its parts, ascending and without gaps.
    pub parts: Vec<Part>,
}

/// A range of elements of a tensor in one file, under the tensor's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The file, within the checkpoint.
    pub file: String,
    /// First element of the tensor.
    pub begin: usize,
    /// Number of elements.
    pub len: usize,
    /// SHA-256 of the bytes, in hexadecimal.
    pub sha256: String,
}

/// Name of the directory of a checkpoint.
fn dir_name(step: usize) -> String {
    format!("step-{step:08}")
}

/// The step of a checkpoint's directory.
fn step_of(name: &str) -> Option<usize> {
    name.strip_prefix("step-")?.parse().ok()
}

fn shard_name(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}
