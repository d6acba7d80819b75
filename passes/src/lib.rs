//! Every graph-to-graph and graph-to-plan transformation, the cost model, and the plan verifier.
//!
//! Passes depend on no device, only on a target description, and do no input or output.

#![forbid(unsafe_code)]

pub mod adapter;
pub mod autocast;
pub mod canonicalize;
pub mod channels_last;
pub mod chunk_loss;
pub mod cost;
pub mod differentiate;
pub mod documents;
pub mod evaluate;
pub mod fp8;
pub mod fuse;
pub mod hold_frozen;
pub mod index_ranges;
pub mod lint;
pub mod loss;
pub mod loss_scale;
pub mod lower;
pub mod memory;
pub mod model_traffic;
pub mod offload;
mod order;
pub mod pad_tensor_cores;
pub mod pass;
#[cfg(test)]
mod proof;
pub mod raise;
pub mod recompute;
pub mod rule;
pub mod schedule;
pub mod shard;
pub mod simplify;
pub mod simulate;
pub mod strip_functions;
pub mod sync_batch_norm;
pub mod update;
pub mod verify_plan;

pub use pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, Remark};
