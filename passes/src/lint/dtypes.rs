//! L10 to L14: dtypes that do not match the hardware, each other, or the communication.

use super::{Facts, Findings, computes_in};
use frit_ir::ops::ParamKind;
use frit_ir::{DType, Graph, Origin};

/// Terms that a sum in bf16 still resolves: it is exact to 2⁻⁸, so the 256th equal term changes nothing
/// and the 64th loses a quarter of its bits.
const BF16_TERMS: usize = 64;

pub(super) fn lint(graph: &Graph, facts: &Facts<'_>, found: &mut Findings) {
    let none = &Origin::none();
    let (f16, bf16) = (computes_in(graph, DType::F16), computes_in(graph, DType::BF16));
    let generation = facts.target.arch.strip_prefix("sm_").and_then(|n| n.parse::<u32>().ok());
    if let (Some(generation), Some(_)) = (generation.filter(|g| *g < 80), bf16) {
        let message = format!("sm_{generation} has no bf16 hardware");
        found.add("L10", none, "", message);
    }
    if let (Some(a), Some(b)) = (f16, bf16) {
        let message = format!("{} computes in f16, and {} in bf16", a.op.name(), b.op.name());
        found.add("L11", &a.origin, "", message);
    }
    let terms = facts.ranks * facts.accumulation;
    match facts.reduce {
        DType::F16 if facts.ranks > 1 => {
            let message = format!("gradients of {} ranks are summed in f16", facts.ranks);
            found.add("L12", none, "", message);
        }
        DType::BF16 if terms > BF16_TERMS => {
            let message = format!(
                "gradients of {} ranks and {} micro-steps are summed in bf16",
                facts.ranks, facts.accumulation
            );
            found.add("L12", none, "", message);
        }
        _ => {}
    }
    let low = facts.compute.is_low_precision();
    if low && facts.sharded && facts.ranks > 1 && facts.gather == Some(DType::F32) {
        let message = format!("parameters are gathered in fp32 and used in {}", facts.compute);
        found.add("L13", none, "", message);
    }
    for (v, param) in graph.params() {
        let stored = (facts.stored)(&param.name).filter(|d| d.is_low_precision());
        if let (Some(stored), ParamKind::Trainable) = (stored, param.kind) {
            let message = format!("`{}` is stored in {stored}", param.name);
            found.add("L14", &graph.def(v).origin, &super::blocks(&param.name), message);
        }
    }
}
