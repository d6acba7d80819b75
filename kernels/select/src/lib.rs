//! Kernel selection: from a kernel's body to what computes it.
//!
//! Everything is made from a body alone, on a machine with no GPU; the answer is data, which a plan keeps. One file per
//! family of operations.
//!
//! | module | what |
//! |---|---|
//! | `assembler` | a body's nodes one after the other, with scratch memory between them |
//! | `routine` | the same for the CPU: one routine |
//! | `source` | one launch of CUDA C++ in the making |
//! | `FAMILY/cudnn.rs` | what cuDNN may compute instead |
//! | [`batches`] | GEMMs over leading axes that broadcast |
//! | [`places`] | where indexed operations read and write |
//! | `sort` | the sort that indexed sums share |

#![forbid(unsafe_code)]

mod adafactor;
mod assembler;
mod attention;
mod batch_norm;
mod batches;
mod conv;
mod convert;
mod embedding;
mod index;
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

use assembler::Assembler;
use frit_ir::Graph;
use frit_ir::plan::{Launches, Routine};

/// The routine of a body that is not generated code on a CPU; `None` if there is none.
pub fn cpu(body: &Graph) -> Option<Routine> {
    routine::select(body)
}

/// The launches of a body that is not generated code on a GPU; `None` if there are none.
pub fn cuda(body: &Graph) -> Option<Launches> {
    Assembler::new(body).assemble()
}
