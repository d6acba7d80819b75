//! Concatenations along the first axis whose operands are computed in their place: the concatenation itself does nothing.

use super::{BufferClass, Lowering};
use frit_ir::plan::{CUDA_OPERAND_ALIGNMENT, Place};
use frit_ir::{Node, Op, Region, TensorType, ValueId};
use std::collections::HashSet;

impl Lowering<'_> {
    /// Decides where operands of concatenations are written: each into its part of the result, if that can be done for all.
    pub(super) fn place_parts(&mut self) {
        let graph = self.graph;
        for (_, node) in graph.nodes() {
            let Op::Concat(concat) = &node.op else { continue };
            let result = node.outputs[0];
            let ty = graph.ty(result).clone();
            if ty.shape.dims()[..concat.axis].iter().any(|n| *n != 1) || self.is_sharded(result) {
                continue;
            }
            let Some(parts) = self.parts(node) else { continue };
            let whole = match self.required.get(&result) {
                Some(place) => place.clone(),
                None => self.workspace("concat", BufferClass::Activation, ty),
            };
            for (value, begin, ty) in parts {
                let place = Place { offset: whole.offset + begin, ty, ..whole.clone() };
                self.required.insert(value, place);
            }
            self.required.insert(result, whole);
        }
    }

    /// The values that kernels write for a concatenation, with the byte of the result where each begins.
    fn parts(&self, node: &Node) -> Option<Vec<(ValueId, usize, TensorType)>> {
        let graph = self.graph;
        let mut parts = Vec::new();
        let (mut begin, mut seen) = (0, HashSet::new());
        for &operand in &node.inputs {
            let mut value = operand;
            while let Op::Reshape(_) = graph.def(value).op {
                value = graph.def(value).inputs[0];
            }
            let ty = graph.ty(value).clone();
            let fits = seen.insert(value)
                && self.is_written_by_kernel(value)
                && !self.required.contains_key(&value)
                && begin % CUDA_OPERAND_ALIGNMENT == 0;
            if !fits {
                return None;
            }
            let bytes = ty.bytes();
            parts.push((value, begin, ty));
            begin += bytes;
        }
        Some(parts)
    }

    /// Whether a kernel of a micro-step writes the value where it is required.
    fn is_written_by_kernel(&self, value: ValueId) -> bool {
        let node = self.graph.def(value);
        let is_kernel = matches!(node.op, Op::Fusion(_) | Op::MatMul(_) | Op::Attention(_));
        is_kernel
            && node.region != Region::Update
            && node.inputs.iter().chain(&node.outputs).all(|v| !self.is_sharded(*v))
    }

    /// Whether the operands of a concatenation are all in their parts of its place, which then has its result.
    pub(super) fn is_in_place(&mut self, node: &Node) -> bool {
        let Some(whole) = self.required.get(&node.outputs[0]).cloned() else { return false };
        let mut begin = whole.offset;
        for operand in &node.inputs {
            let Some(place) = self.places.get(operand) else { return false };
            if place.buffer != whole.buffer || place.offset != begin {
                return false;
            }
            begin += place.ty.bytes();
        }
        self.places.insert(node.outputs[0], whole);
        true
    }
}
