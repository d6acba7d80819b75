//! Fusion: groups of nodes that run as one kernel become single `fusion` nodes.
//!
//! In: the final graph. Out: the same graph in which every elementwise operation, reduction, normalization, softmax and
//! loss is in a `fusion` node, alone or with others, and matmuls have epilogues ([`gemm`]), batch normalizations ReLUs ([`batch_norm`]), operations on images the transposes
//! around them ([`channels_last`]). A cross-entropy and its
//! gradient are one region ([`loss`]); the gradient of an embedding is added to another gradient of its table
//! ([`embedding`]), and low-precision values are widened where they are read ([`widen`]). [`region`] defines what each kind of region may contain; merges are selected
//! greedily by bytes saved ([`merge`]).
//!
//! Not fused: leaves, collectives, attention, embeddings, matmuls without an epilogue, data movement other than reshape and expand, the
//! scalars of the update, optimizer steps, and all operations on sharded values, which lowering handles per flat group.

mod attention;
mod batch_norm;
mod channels_last;
mod cluster;
mod col_reduce;
mod embedding;
mod emit;
mod facts;
mod gemm;
mod inductor;
mod loss;
mod merge;
mod quantized;
mod region;
mod row_reduce;
#[cfg(test)]
pub(crate) mod tests;
mod widen;

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property};
use cluster::Clusters;
use facts::Facts;
use frit_ir::ops::FusionKind;
use frit_ir::{Diagnostic, Graph, Origin};
pub(crate) use loss::factor_of;
pub(crate) use merge::MAX_INTERFACE;

/// The contract of [`Fuse`].
pub const INFO: PassInfo = PassInfo {
    name: "fuse",
    summary: "group nodes that run as one kernel",
    requires: &[Property::Sharded],
    ensures: &[Property::Fused],
    breaks: &[],
    numerics: Numerics::Bitwise,
};

/// Which regions are formed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rules {
    /// Those for which Frit has kernels.
    #[default]
    Frit,
    /// Those that torch.compile forms, for the reference plan of the simulator: see [`inductor`].
    Inductor,
}

/// Groups nodes into regions.
#[derive(Clone, Copy, Debug)]
pub struct Fuse {
    /// Whether a region with this body can be compiled; others are not formed.
    pub supported: fn(&Graph, FusionKind) -> bool,
    /// Which regions are formed of those that can be compiled.
    pub rules: Rules,
}

impl Default for Fuse {
    /// Every region can be compiled.
    fn default() -> Self {
        Fuse { supported: |_, _| true, rules: Rules::Frit }
    }
}

impl Pass for Fuse {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        attention::share_layout(graph)?;
        if self.rules == Rules::Frit {
            loss::move_gradients(graph);
            embedding::add_in_gradients(graph)?;
        }
        widen::in_every_region(graph)?;
        let facts = Facts::new(graph);
        let mut clusters = Clusters::new(&facts, self.supported, self.rules);
        quantized::form(&mut clusters);
        gemm::form(&mut clusters);
        attention::form(&mut clusters);
        batch_norm::form(&mut clusters);
        channels_last::form(&mut clusters);
        clusters.seed();
        let before = clusters.bytes();
        merge::merge(&mut clusters);
        merge::duplicate(&mut clusters);
        let after = clusters.bytes();
        let (fused, remarks) = emit::emit(&clusters)?;
        if remarks.regions == 0 {
            return Ok(Changed::No);
        }
        for (origin, message) in remarks.members {
            context.remark(&origin, message);
        }
        let message = format!(
            "{} nodes in {} regions; they read and write {after} bytes, one by one {before}",
            remarks.nodes, remarks.regions
        );
        context.remark(&Origin::none(), message);
        *graph = fused;
        Ok(Changed::Yes)
    }
}
