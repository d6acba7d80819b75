//! Casts from a low-precision float to f32 run in every part of the step that reads them, so that the narrow value and not the wide
//! one is kept from forward to backward: kernels widen what they read for nothing. The norms of a narrow residual stream keep it so.

use super::facts::Facts;
use super::{INFO, region};
use crate::pass::bug;
use frit_ir::{DType, Diagnostic, Graph, NodeId, Op, Region, ValueId};
use std::collections::BTreeMap;

/// Readers in one region of a cast in another.
struct Crossing {
    cast: NodeId,
    region: Region,
    /// In graph order.
    readers: Vec<NodeId>,
}

/// Copies casts into the regions whose kernels can widen what they read.
pub(super) fn in_every_region(graph: &mut Graph) -> Result<(), Diagnostic> {
    for Crossing { cast, region, readers } in crossings(graph) {
        let node = graph.node(cast).clone();
        let wide =
            graph.add1(node.op, &node.inputs, node.origin, region).map_err(bug(INFO.name))?;
        let copy = graph.value(wide).def;
        graph.move_before(readers[0], &[copy]);
        for reader in readers {
            let swap = |v: &ValueId| if *v == node.outputs[0] { wide } else { *v };
            let inputs = graph.node(reader).inputs.iter().map(swap).collect();
            graph.set_inputs(reader, inputs).map_err(bug(INFO.name))?;
        }
    }
    graph.remove_dead();
    Ok(())
}

fn crossings(graph: &Graph) -> Vec<Crossing> {
    let (facts, users) = (Facts::new(graph), graph.users());
    let mut crossings = Vec::new();
    for (cast, node) in graph.nodes() {
        let Op::Cast(op) = &node.op else { continue };
        let from = graph.ty(node.inputs[0]).dtype;
        if op.to != DType::F32 || !matches!(from, DType::F16 | DType::BF16) {
            continue;
        }
        let mut by_region: BTreeMap<Region, Vec<NodeId>> = BTreeMap::new();
        for reader in &users[node.outputs[0].0 as usize] {
            by_region.entry(graph.node(*reader).region).or_default().push(*reader);
        }
        for (region, readers) in by_region.into_iter().filter(|(r, _)| *r != node.region) {
            if readers.iter().all(|r| region::is_fusable(&facts, graph.node(*r))) {
                crossings.push(Crossing { cast, region, readers });
            }
        }
    }
    crossings
}

#[cfg(test)]
mod tests {
    use crate::fuse::tests::{fuse, outline, parse};

    fn regions(nodes: &str) -> String {
        let leaves = r#"
            %x: bf16[4, 8] = input {name = "x", ty = {"dtype":"bf16","shape":[4,8]}}
            %d: f32[4, 8] = input {name = "d", ty = {"dtype":"f32","shape":[4,8]}}
            %w: f32[8] = input {name = "w", ty = {"dtype":"f32","shape":[8]}}"#;
        outline(&fuse(&parse(&format!("{leaves}\n{nodes}"))))
    }

    #[test]
    fn backward_widens_again_what_forward_widened() {
        let norm = regions(
            r#"%c: f32[4, 8] = cast %x {to = "f32"}
               %y: f32[4, 8], %r: f32[4] = rms_norm %c, %w {axis = 1, eps = 1e-5}
               %g: f32[4, 8] = rms_norm_grad_input %d, %c, %w, %r {axis = 1} @backward
               return %y as "y"
               return %g as "g""#,
        );
        // Forward writes no wide copy: its results are the norm and its statistic.
        assert_eq!(
            norm,
            "row_reduce(cast rms_norm) 2->2; row_reduce(cast rms_norm_grad_input) 4->1"
        );
    }

    #[test]
    fn what_no_kernel_widens_is_kept_wide() {
        // A matmul would read a wide copy that a kernel of its own writes.
        let matmul = regions(
            r#"%c: f32[4, 8] = cast %x {to = "f32"}
               %y: f32[4, 8] = exp %c
               %g: f32[4, 4] = matmul %c, %d {trans_b = true} @backward
               return %y as "y"
               return %g as "g""#,
        );
        assert_eq!(matmul, "pointwise(cast exp) 1->2; matmul");
        // Narrowing is not done twice: the narrow value is what is kept.
        let narrowed = regions(
            r#"%c: bf16[4, 8] = cast %d {to = "bf16"}
               %y: bf16[4, 8] = neg %c
               %g: bf16[4, 8] = exp %c @backward
               return %y as "y"
               return %g as "g""#,
        );
        assert_eq!(narrowed, "pointwise(cast neg) 1->2; pointwise(exp) 1->1");
    }
}
