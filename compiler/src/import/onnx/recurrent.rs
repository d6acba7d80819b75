//! The weights of recurrent layers, which ONNX packs.
//!
//! A node has one tensor for all directions of a layer, with the gates in another order than PyTorch's, and both biases in one. The
//! dynamo exporter writes nodes that pack PyTorch's parameters, and its optimization computes these; the call behind the node still
//! names the parameters: `lstm(x, [h0, c0], [weight_ih, weight_hh, bias_ih, bias_hh, …], …)`, direction by direction, layer by layer.

use super::Importer;
use super::calls::Calls;
use super::context::Bound;
use super::messages::TensorProto;
use super::tensor::{self, Stored};
use super::trainable::Trainable;
use crate::import::limits::Resource;
use frit_ir::ops::{Concat, Reshape, Slice};
use frit_ir::{Code, Diagnostic, Op, Origin, Region, Shape, TensorType, ValueId};
use std::collections::HashMap;

/// Operators: the operation of PyTorch that is written so, and of each of ONNX's gates the number of PyTorch's.
const LAYERS: &[(&str, &str, &[usize])] = &[
    // Input, output, forget, cell; PyTorch's: input, forget, cell, output.
    ("LSTM", "lstm", &[0, 3, 1, 2]),
    // Update, reset, hidden; PyTorch's: reset, update, new.
    ("GRU", "gru", &[1, 0, 2]),
];

/// Parameters that one tensor of a recurrent layer holds, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    pub(crate) parameters: Vec<String>,
    /// Of each gate of the tensor the number in the parameters.
    gates: &'static [usize],
    /// The shape of each parameter.
    shape: Vec<usize>,
    /// The shape of the tensor.
    pub(crate) dims: Vec<i64>,
}

/// Whether the operator is such a layer.
pub(super) fn is_layer(op_type: &str) -> bool {
    LAYERS.iter().any(|(layer, ..)| *layer == op_type)
}

impl Packed {
    /// What the tensors of a recurrent layer hold, each with the position of the operand: of the node at `place`, the one of this
    /// number among those of its call.
    pub(super) fn of(calls: &Calls<'_>, place: usize, layer: usize) -> Vec<(usize, Packed)> {
        let node = &calls.graph.node[place];
        let Some(call) = &calls.calls[place] else { return vec![] };
        let of_node =
            |(op_type, op, _): &&(&str, &str, &[usize])| *op_type == node.op_type && *op == call.op;
        let Some((op_type, _, gates)) = LAYERS.iter().find(of_node) else { return vec![] };
        let dims = |i: usize| calls.stored.get(node.input.get(i)?.as_str()).copied();
        let Some(&[directions @ (1 | 2), ..]) = dims(1) else { return vec![] };
        let directions = directions as usize;
        let has_bias = node.input.get(3).is_some_and(|name| !name.is_empty());
        let of_one = if has_bias { 4 } else { 2 };
        let of_layer = directions * of_one;
        // The weights are the last tensors of the call.
        let named = calls.named_parameters(place);
        let all = calls.nodes_of(place, op_type).saturating_mul(of_layer);
        let first = named.len().checked_sub(all).map(|first| first + layer * of_layer);
        let own = first.and_then(|first| named.get(first..first + of_layer)).unwrap_or_default();
        let Some(own) = own.iter().copied().collect::<Option<Vec<&str>>>() else { return vec![] };
        if own.is_empty() {
            return vec![];
        }
        let of_operand = |(i, parts): (usize, &[usize])| {
            let name = node.input.get(i)?;
            let dims = dims(i).filter(|_| !calls.is_listed(name))?;
            let parameters =
                own.chunks(of_one).flat_map(|of| parts.iter().map(|k| of[*k].to_string()));
            Packed::new(parameters.collect(), parts.len(), gates, dims).map(|packed| (i, packed))
        };
        let operands: [(usize, &[usize]); 3] = [(1, &[0]), (2, &[1]), (3, &[2, 3])];
        operands.into_iter().take(1 + of_one / 2).filter_map(of_operand).collect()
    }

    /// Parameters, so many for each direction, in a tensor of this shape.
    fn new(
        parameters: Vec<String>,
        of_direction: usize,
        gates: &'static [usize],
        dims: &[i64],
    ) -> Option<Packed> {
        let sizes: Vec<usize> =
            dims.iter().map(|n| usize::try_from(*n).ok()).collect::<Option<_>>()?;
        let (directions, rest) = sizes.split_first()?;
        let (rows, columns) = rest.split_first()?;
        let fits = *directions * of_direction == parameters.len()
            && rows.is_multiple_of(of_direction * gates.len())
            && columns.len() == usize::from(of_direction == 1);
        let shape = [&[rows / of_direction], columns].concat();
        fits.then(|| Packed { parameters, gates, shape, dims: dims.to_vec() })
    }

    /// The elements of the parameters.
    fn unpacked(&self, tensor: &[u8]) -> Vec<Vec<u8>> {
        let size = tensor.len() / self.parameters.len();
        let parts = tensor.chunks_exact(size.max(1));
        parts.map(|part| reordered(part, self.gates, false)).collect()
    }

    /// The elements of the tensor.
    pub(crate) fn packed(&self, parameters: &[impl AsRef<[u8]>]) -> Vec<u8> {
        parameters.iter().flat_map(|part| reordered(part.as_ref(), self.gates, true)).collect()
    }
}

/// The gates in the other order.
fn reordered(part: &[u8], gates: &[usize], to_onnx: bool) -> Vec<u8> {
    let size = part.len() / gates.len();
    let mut all = vec![0; part.len()];
    for (onnx, pytorch) in gates.iter().enumerate() {
        let (from, to) = if to_onnx { (*pytorch, onnx) } else { (onnx, *pytorch) };
        all[to * size..][..size].copy_from_slice(&part[from * size..][..size]);
    }
    all
}

impl Importer<'_> {
    /// Gives recurrent layers their parameters back.
    pub(super) fn restore_packed(&mut self, trainable: &Trainable<'_>) {
        let stored: HashMap<&str, &TensorProto> =
            self.source.initializer.iter().map(|t| (t.name.as_str(), t)).collect();
        for (place, node) in self.nodes.clone() {
            for (i, operand) in node.input.iter().enumerate() {
                let Some(packed) = self.restored.packed(place, i).cloned() else { continue };
                let Some(proto) = stored.get(operand.as_str()) else { continue };
                if packed.parameters.iter().all(|name| self.is_restored(name)) {
                    continue;
                }
                let bytes = tensor::type_of(proto).map_or(0, |ty| ty.bytes());
                if let Err(e) = self.budget.charge(Resource::Bytes, bytes as u64) {
                    self.report.push(e.diagnostic(&node.op_type, &Origin::new(&node.name, "")));
                    return;
                }
                let found = match tensor::read(proto, &mut self.files) {
                    Ok(found) => found,
                    Err(error) => {
                        let message =
                            format!("the initializer \"{operand}\" cannot be read: {error}");
                        self.report.push(Diagnostic::error(Code::InitializerUnreadable, message));
                        continue;
                    }
                };
                let parts = packed.unpacked(&found.bytes);
                for (name, bytes) in packed.parameters.iter().zip(parts) {
                    if !self.is_restored(name) {
                        let ty = TensorType::new(found.ty.dtype, packed.shape.clone());
                        self.restore(name, operand, Stored { ty, bytes: bytes.into() }, trainable);
                    }
                }
            }
        }
    }

    /// The tensor of a recurrent layer, made of its parameters.
    pub(super) fn packed_operand(&mut self, packed: &Packed, origin: &Origin) -> Option<Bound> {
        let mut gates: Vec<ValueId> = vec![];
        for name in &packed.parameters {
            let value = self.restored_value(name)?;
            let mut size = packed.shape.clone();
            size[0] /= packed.gates.len();
            for gate in packed.gates {
                let mut start = vec![0; size.len()];
                start[0] = gate * size[0];
                let slice = Slice { start, size: size.clone(), step: vec![1; size.len()] };
                let add =
                    self.graph.add1(Op::Slice(slice), &[value], origin.clone(), Region::Forward);
                gates.push(add.ok()?);
            }
        }
        let rows = Op::Concat(Concat { axis: 0 });
        let rows = self.graph.add1(rows, &gates, origin.clone(), Region::Forward).ok()?;
        let dims = packed.dims.iter().map(|n| usize::try_from(*n).ok()).collect::<Option<_>>()?;
        let whole = Op::Reshape(Reshape { shape: Shape(dims) });
        let whole = self.graph.add1(whole, &[rows], origin.clone(), Region::Forward).ok()?;
        Some(Bound::Value(whole))
    }
}
