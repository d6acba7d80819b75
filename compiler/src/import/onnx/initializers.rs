//! Converts initializers to parameters, or to constants if they are small and do not train; large positional masks are
//! computed instead ([`super::masks`]).
//!
//! Operands whose initializer the exporter merged or renamed get their own parameter back ([`super::restore`]), with a warning
//! for those that cannot be restored.

mod computed;

use super::context::{self, Bound};
use super::masks::Positions;
use super::messages::{NodeProto, TensorProto};
use super::subgraph::operands;
use super::tensor::{self, Stored};
use super::{Importer, Inlined, trainable};
use crate::import::limits::Resource;
use frit_ir::ops::{Cast, Constant, Init, Param, ParamKind, Reshape, Transpose};
use frit_ir::{Code, DType, Diagnostic, Op, Origin, Region, Shape, TensorType, ValueId};
use std::collections::{HashMap, HashSet};

/// Float initializers that do not train become constants up to this many elements.
const MAX_INLINED: usize = 1 << 12;
/// Names that one warning lists at most.
const MAX_LISTED: usize = 8;
impl<'a> Importer<'a> {
    pub(super) fn initializers(&mut self) {
        let data: HashSet<&str> = self.inputs.iter().map(|i| i.name.as_str()).collect();
        let nodes: Vec<&NodeProto> = self.nodes.iter().map(|(_, n)| *n).collect();
        let restored: HashSet<String> =
            self.restored.names().into_iter().map(str::to_string).collect();
        let from = (self.from_pytorch, &restored);
        let trainable = trainable::Trainable::new(self.source, &nodes, &data, from, self.options);
        let mut needed: HashSet<&str> = nodes.iter().flat_map(|n| operands(n)).collect();
        needed.extend(self.source.output.iter().map(|o| o.name.as_str()));
        let tied = self.tied(&trainable);
        let mut unreached = Vec::new();
        for proto in &self.source.initializer {
            let name = proto.name.as_str();
            if tied.contains_key(name) {
                continue;
            }
            let is_float = tensor::is_float(proto.data_type);
            if !needed.contains(name) || (is_float && !self.restored.keeps(name)) {
                continue;
            }
            if self.values.contains_key(name) {
                let message = format!("the initializer \"{name}\" is defined twice");
                self.report.push(Diagnostic::error(Code::ValueDefinedTwice, message));
                continue;
            }
            let stored = match tensor::read(proto, &mut self.files) {
                Ok(stored) => stored,
                Err(error) => {
                    let message = format!("the initializer \"{name}\" cannot be read: {error}");
                    let help = match proto.data_location {
                        1 => "keep external data files beside the model, under their own names",
                        _ => "the file is damaged or was edited; export the model again",
                    };
                    let error = Diagnostic::error(Code::InitializerUnreadable, message);
                    self.report.push(error.help(help));
                    continue;
                }
            };
            let (kind, reason) = if stored.ty.dtype.is_float() {
                let (kind, mut reason) = trainable.decide(name, name, &stored);
                if trainable.is_unreached(name, &stored.ty) {
                    unreached.push((name, stored.ty.clone()));
                }
                if kind == ParamKind::Trainable
                    && let Some(row) = trainable.padding_row(name, &stored)
                {
                    self.padding_rows.insert(name, row);
                    reason += &format!(
                        " Row {row} is zero, as a padding row: looking it up gives no gradient."
                    );
                }
                let copies = tied.iter().filter(|(_, t)| t.parameter == name);
                for (copy, _) in copies {
                    reason += &format!(" `{copy}` is the same parameter.");
                }
                (kind, reason)
            } else {
                (ParamKind::Buffer, format!("its elements are {}.", stored.ty.dtype))
            };
            let inline = kind == ParamKind::Buffer && !trainable.is_renewed(name);
            self.initializer(name, stored, (kind, inline), reason);
        }
        self.unreached(&unreached, |name| trainable.is_reaching(name));
        self.tie(tied);
        self.restore_parameters(&trainable);
        self.restore_packed(&trainable);
        self.computed();
        self.missing_parameters(&trainable);
    }

    /// Warns of parameters of the PyTorch module that the graph does not have.
    fn missing_parameters(&mut self, trainable: &trainable::Trainable<'_>) {
        let stored: HashSet<&str> =
            self.source.initializer.iter().map(|t| t.name.as_str()).collect();
        // Without optimization all that no call reads are unused parameters and second names of tied ones.
        let is_optimized = self.restored.is_optimized() || trainable.has_folded(self.source);
        let mut missing: Vec<String> = trainable::listed(self.source, "PARAMETER")
            .into_values()
            .filter(|name| is_optimized || self.restored.is_called(name))
            .filter(|n| !stored.contains(n.as_str()) && !self.restored_values.contains_key(n))
            .collect();
        missing.sort();
        if missing.is_empty() {
            return;
        }
        let message = match missing.len() {
            1 => "a parameter of the PyTorch module is not in the graph and does not train".into(),
            n => format!(
                "{n} parameters of the PyTorch module are not in the graph and do not train"
            ),
        };
        let mut warning = Diagnostic::warning(Code::ParametersMissing, message).help(
            "unused, tied to another, merged with one of the same values, or computed with by the \
             exporter; export with optimize=False",
        );
        for name in missing.iter().take(MAX_LISTED) {
            warning = warning.note(name.clone());
        }
        self.warnings.push(warning);
    }

    /// Gives operands of merged or renamed initializers their own parameters back.
    fn restore_parameters(&mut self, trainable: &trainable::Trainable<'_>) {
        let stored: HashMap<&str, &TensorProto> =
            self.source.initializer.iter().map(|t| (t.name.as_str(), t)).collect();
        let mut read: HashSet<&str> = HashSet::new();
        for (place, node) in self.nodes.clone() {
            for (i, operand) in node.input.iter().enumerate() {
                let Some(parameter) = self.restored.parameter(place, i).cloned() else { continue };
                let name = parameter.name.as_str();
                let Some(proto) = stored.get(operand.as_str()) else { continue };
                if self.is_restored(name) {
                    continue;
                }
                // A repeated read for another name may be copied.
                let bytes = tensor::type_of(proto).map_or(0, |ty| ty.bytes());
                if !read.insert(operand.as_str())
                    && let Err(e) = self.budget.charge(Resource::Bytes, bytes as u64)
                {
                    self.report.push(e.diagnostic(&node.op_type, &Origin::new(&node.name, "")));
                    return;
                }
                match tensor::read(proto, &mut self.files) {
                    Ok(found) => {
                        let mut found =
                            if parameter.transposed { found.transposed() } else { found };
                        if parameter.column.is_some() {
                            found.ty.shape = Shape::from([found.ty.shape.numel()]);
                        }
                        self.restore(name, operand, found, trainable);
                    }
                    Err(error) => {
                        let message =
                            format!("the initializer \"{operand}\" cannot be read: {error}");
                        self.report.push(Diagnostic::error(Code::InitializerUnreadable, message));
                    }
                }
            }
            let Some(name) = self.restored.zero_bias(place).map(str::to_string) else { continue };
            let weight = node.input.get(1).and_then(|w| Some((w, *stored.get(w.as_str())?)));
            let known = self.is_restored(&name);
            let (Some((weight, proto)), false) = (weight, known) else { continue };
            let transposed = node.attribute.iter().any(|a| a.name == "transB" && a.i != 0);
            let rows = transposed || node.op_type == "Conv";
            let groups = node.attribute.iter().find(|a| a.name == "group");
            let groups = groups.filter(|_| node.op_type == "ConvTranspose").map_or(1, |a| a.i);
            let n = proto.dims.get(usize::from(!rows)).map(|n| n.saturating_mul(groups));
            let ty = n.and_then(|n| usize::try_from(n).ok()).and_then(|n| {
                let dtype = tensor::dtype(proto.data_type.into()).ok()?;
                Some(TensorType::new(dtype, [n]))
            });
            if let Some(ty) = ty {
                if let Err(e) = self.budget.charge(Resource::Bytes, ty.bytes() as u64) {
                    self.report.push(e.diagnostic(&node.op_type, &Origin::new(&node.name, "")));
                    return;
                }
                let bytes = vec![0; ty.bytes()].into();
                self.restore(&name, weight, Stored { ty, bytes }, trainable);
            }
        }
    }

    /// Adds a parameter that no initializer has the name of; `place` is what holds or stands beside it.
    pub(super) fn restore(
        &mut self,
        name: &str,
        place: &str,
        stored: Stored,
        trainable: &trainable::Trainable<'_>,
    ) {
        let (kind, reason) = trainable.decide(name, place, &stored);
        let reason = format!("{reason} The exporter stored it under another name.");
        if let Some(value) = self.parameter(name, stored, kind, reason) {
            self.restored_values.insert(name.into(), value);
        }
    }

    /// The all-zero bias that the exporter dropped from a matmul.
    pub(super) fn restored_bias(&self, place: usize) -> Option<Bound> {
        let name = self.restored.zero_bias(place)?;
        self.restored_value(name).map(Bound::Value)
    }

    /// Whether there is a parameter of this name.
    pub(super) fn is_restored(&self, name: &str) -> bool {
        self.values.contains_key(name) || self.restored_values.contains_key(name)
    }

    /// The value of the parameter of this name.
    pub(super) fn restored_value(&self, name: &str) -> Option<ValueId> {
        match self.values.get(name) {
            Some(Bound::Value(value)) => Some(*value),
            _ => self.restored_values.get(name).copied(),
        }
    }

    /// The value of an operand that is a constant, although it is stored as a parameter.
    fn constant_operand(&mut self, place: usize, i: usize, origin: &Origin) -> Option<Bound> {
        let name = self.source.node.get(place)?.input.get(i)?;
        let proto = self.source.initializer.iter().find(|t| t.name == *name)?;
        let bytes = tensor::type_of(proto).map_or(0, |ty| ty.bytes());
        if let Err(e) = self.budget.charge(Resource::Bytes, bytes as u64) {
            self.report.push(e.diagnostic("Constant", origin));
            return None;
        }
        let value = tensor::read(proto, &mut self.files).and_then(|stored| stored.tensor()).ok()?;
        let op = Op::Constant(Constant { value });
        let value = self.graph.add1(op, &[], origin.clone(), Region::Forward).ok()?;
        Some(Bound::Value(value))
    }

    /// The value of an operand that stands for a parameter of another name.
    pub(super) fn restored_operand(
        &mut self,
        place: usize,
        i: usize,
        origin: &Origin,
    ) -> Option<Bound> {
        if self.restored.is_constant(place, i) {
            return self.constant_operand(place, i, origin);
        }
        if let Some(packed) = self.restored.packed(place, i).cloned() {
            return self.packed_operand(&packed, origin);
        }
        let parameter = self.restored.parameter(place, i)?;
        let value = self.restored_value(&parameter.name)?;
        let op = match (&parameter.column, parameter.transposed) {
            (Some(dims), _) => {
                let dims = dims.iter().map(|n| usize::try_from(*n).ok()).collect::<Option<_>>()?;
                Op::Reshape(Reshape { shape: Shape(dims) })
            }
            (None, true) => {
                let perm = (0..self.graph.ty(value).shape.rank()).rev().collect();
                Op::Transpose(Transpose { perm })
            }
            (None, false) => return Some(Bound::Value(value)),
        };
        let turned = self.graph.add1(op, &[value], origin.clone(), Region::Forward).ok()?;
        Some(Bound::Value(turned))
    }

    /// Adds a leaf; one that may be inlined becomes a constant if it is small, or is computed if it is a mask by
    /// position.
    fn initializer(
        &mut self,
        name: &'a str,
        stored: Stored,
        (kind, inline): (ParamKind, bool),
        reason: String,
    ) {
        let limit = if stored.ty.dtype.is_float() { MAX_INLINED } else { context::MAX_FOLDED };
        let ty = stored.ty.clone();
        if inline && ty.shape.numel() <= limit {
            match stored.tensor() {
                Ok(value) => {
                    self.leaf(Op::Constant(Constant { value }), name);
                    self.inlined.push(Inlined { name: name.into(), ty, reason });
                }
                Err(error) => {
                    let message = format!("the initializer \"{name}\" cannot be read: {error}");
                    self.report.push(Diagnostic::error(Code::InitializerUnreadable, message));
                }
            }
            return;
        }
        if inline && let Some(positions) = Positions::of(&stored) {
            match self.mask(&positions, &ty) {
                Ok(value) => {
                    self.graph.set_name(value, name);
                    self.values.insert(name, Bound::Value(value));
                    self.inlined.push(Inlined { name: name.into(), ty, reason });
                }
                Err(e) => self.report.push(Diagnostic::error(Code::OperandMismatch, e.to_string())),
            }
            return;
        }
        if let Some(value) = self.parameter(name, stored, kind, reason) {
            self.values.insert(name, Bound::Value(value));
        }
    }

    /// The value of a parameter in the dtype it is stored in. What the optimizer updates is f32: a
    /// parameter that is stored in less is widened, and cast back where it is used.
    fn parameter(
        &mut self,
        name: &str,
        stored: Stored,
        kind: ParamKind,
        reason: String,
    ) -> Option<ValueId> {
        let own = stored.ty.dtype;
        let widened = kind != ParamKind::Buffer && own.is_low_precision();
        let ty = if widened { stored.ty.with_dtype(DType::F32) } else { stored.ty.clone() };
        let inserted = if widened {
            self.weights.insert_as_f32(name, &stored.ty, stored.bytes)
        } else {
            self.weights.insert(name, stored.ty, stored.bytes)
        };
        if let Err(error) = inserted {
            self.report.push(Diagnostic::error(Code::InitializerUnreadable, error.to_string()));
        }
        let (held, unit, sharded, init) = (None, None, false, Init::Weights);
        let param = Param { name: name.into(), ty, kind, reason, init, held, unit, sharded };
        let mut add = |op: Op, inputs: &[ValueId]| {
            let added = self.graph.add1(op, inputs, Origin::none(), Region::Forward);
            added
                .map_err(|e| {
                    self.report.push(Diagnostic::error(Code::OperandMismatch, e.to_string()))
                })
                .ok()
        };
        let value = add(Op::Param(param), &[])?;
        let narrow = if widened { Some(add(Op::Cast(Cast { to: own }), &[value])?) } else { None };
        self.graph.set_name(value, name);
        Some(narrow.unwrap_or(value))
    }
}
