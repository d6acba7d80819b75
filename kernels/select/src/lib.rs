//! Kernel selection: which routine or launches compute a kernel's body.
//!
//! Selection depends on the body alone and needs no GPU; its result is data stored in the plan. One file per family of operations.
//!
//! | module | what |
//! |---|---|
//! | `assembler` | launches for the nodes of a body in order, with scratch memory between them |
//! | `routine` | the CPU routine for a body |
//! | `source` | builder for one launch of CUDA C++ |
//! | `generated` | builder for a generated kernel that a candidate launches |
//! | `last` | bodies whose images lie channels last |
//! | `FAMILY/cudnn.rs` | cuDNN candidates |
//! | [`batches`] | batched GEMMs with broadcast leading axes |
//! | [`places`] | element positions of indexed operations |
//! | `sort` | the sort shared by indexed sums |

#![forbid(unsafe_code)]

mod adafactor;
mod assembler;
mod attention;
mod batch_norm;
mod batches;
mod conv;
mod convert;
mod embedding;
mod generated;
mod index;
mod last;
mod layout;
mod matmul;
mod order;
mod places;
mod pool;
mod quantize;
mod random;
mod reduce;
mod routine;
mod sort;
mod source;
mod window;

use frit_ir::Graph;
use frit_ir::ops::FusionKind;
use frit_ir::plan::{Launches, Routine};

/// The routine of a body that is not generated code on a CPU; `None` if there is none.
pub fn cpu(body: &Graph) -> Option<Routine> {
    routine::select(body)
}

/// How kernels are selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Whether every candidate computes the same bits in every run.
    pub deterministic: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { deterministic: true }
    }
}

/// What computes a body on a GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selected {
    /// Its launches. Generated kernels are named by their index in `generated`, without scratch memory; see
    /// [`Launches::link`].
    pub entry: Launches,
    /// The bodies of the generated kernels that are launched, and how they are compiled.
    pub generated: Vec<(Graph, FusionKind)>,
}

/// The launches of a body that is not generated code on a GPU; `None` if there are none.
pub fn cuda(body: &Graph, options: Options) -> Option<Selected> {
    assembler::select(body, options.deterministic)
}
