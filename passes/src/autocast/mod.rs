//! Mixed precision: assigns a compute dtype to every node.
//!
//! In: a raised f32 graph. Out: the same graph with casts where precisions meet, one per value and dtype. Parameters stay f32 and
//! their uses are cast; outputs keep their declared dtype; the model's own casts are respected, and so are the dtypes that functions
//! state, over every option. [`policy`] has the precision class of
//! every operation, `assign` decides the rest, [`baseline`] counts the casts of casting one operation at a time.

mod assign;
mod baseline;
mod constants;
mod functions;
mod integers;
mod min_cut;
pub mod policy;
mod residual;

use crate::loss::evaluation::STATISTICS;
use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use assign::{Assignment, Precision};
use frit_ir::ops::precision::Class;
use frit_ir::ops::{Cast, Constant, ParamKind, ScatterElements, ScatterFn, ScatterNd};
use frit_ir::pattern;
use frit_ir::{
    Code, DType, Diagnostic, Graph, GraphError, Node, NodeId, Op, Origin, Output, OutputKind,
    Severity, Tensor, ValueId, nearest,
};
use std::collections::{HashMap, HashSet};

/// The contract of [`Autocast`].
pub const INFO: PassInfo = PassInfo {
    name: "autocast",
    summary: "assign every node the dtype it computes in",
    requires: &[Property::Raised],
    ensures: &[Property::Autocast],
    breaks: &[],
    numerics: Numerics::LowersPrecision,
};

/// A dtype for some nodes, whatever their class says.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    /// Pattern of the scopes it applies to; all if absent.
    pub scope: Option<String>,
    /// The operation it applies to; all if absent.
    pub op: Option<String>,
    /// The dtype to compute in: f32, or the plan's low-precision dtype.
    pub dtype: DType,
    /// The dtype of its results, if it is another.
    pub output: Option<DType>,
}

impl Override {
    /// Whether it matches this node.
    pub(crate) fn applies(&self, node: &Node) -> bool {
        self.scope.as_ref().is_none_or(|given| pattern::matches(given, &node.origin.scope))
            && self.op.as_ref().is_none_or(|name| *name == node.op.name())
    }
}

/// Gives every node the dtype it computes in.
#[derive(Clone, Debug, PartialEq)]
pub struct Autocast {
    /// The dtype of contractions; f32 changes nothing but for overrides.
    pub compute: DType,
    /// Compute everything in `compute` but the loss, not only what the policy allows.
    pub pure: bool,
    /// Whether the residual stream is rounded to `compute`; see [`residual`].
    pub narrow_residual: bool,
    /// Whether contractions write f32 where only f32 is made of their results; if not, they always round, as in PyTorch.
    pub keep_accumulators: bool,
    /// Round parameters to this dtype, for every use.
    pub param_dtype: Option<DType>,
    /// Round float buffers to this dtype, for every use, except those that the forward pass updates.
    pub buffer_dtype: Option<DType>,
    /// Exceptions; of several that apply the last wins.
    pub overrides: Vec<Override>,
}

impl Pass for Autocast {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        self.unused_overrides(graph, context);
        let stated = functions::stated(graph);
        let Some(low) = self.low_dtype(&stated)? else { return Ok(Changed::No) };
        let bound = self.bound(graph, low, &stated, context);
        let keep = self.keep_accumulators;
        let assignment = assign::assign(graph, &bound, low, self.compute == low, keep);
        let baseline = baseline::casts(graph, low, &bound, self.compute == low);
        let message = format!(
            "casting one operation at a time, as PyTorch does at run time: {} casts of {} bytes",
            baseline.casts, baseline.bytes
        );
        context.remark(&Origin::none(), message);
        context.cast_baseline = Some(baseline);
        constants::warn_of_lost(graph, low, &assignment, context);
        let mut rebuild = Rebuild::new(graph, low, &assignment, self);
        rebuild.run(context).map_err(bug(INFO.name))?;
        let (casts, mut new) = (rebuild.casts.len(), rebuild.new);
        new.remove_dead();
        *graph = new;
        let lowered = |n: &&Node| n.outputs.iter().any(|v| graph.ty(*v).dtype == low);
        let lowered = graph.nodes().map(|(_, n)| n).filter(lowered).count();
        let message = format!("{lowered} of {} nodes write {low}; {casts} casts", graph.len());
        context.remark(&Origin::none(), message);
        Ok(Changed::Yes)
    }
}

impl Autocast {
    /// The policy for this dtype, without exceptions.
    pub fn new(compute: DType) -> Self {
        let (overrides, param_dtype, buffer_dtype) = (Vec::new(), None, None);
        let (pure, narrow_residual, keep_accumulators) = (false, false, true);
        Autocast {
            compute,
            pure,
            narrow_residual,
            keep_accumulators,
            param_dtype,
            buffer_dtype,
            overrides,
        }
    }

    /// The one low-precision dtype of the plan, if there is any.
    fn low_dtype(&self, stated: &HashMap<NodeId, DType>) -> Result<Option<DType>, Diagnostic> {
        let mut low = None;
        let overrides = self.overrides.iter().flat_map(|o| [Some(o.dtype), o.output]);
        let whole = [Some(self.compute), self.param_dtype, self.buffer_dtype];
        for dtype in overrides.chain(whole).flatten().chain(stated.values().copied()) {
            match (dtype, low) {
                (DType::F32, _) => {}
                (DType::F16 | DType::BF16, None) => low = Some(dtype),
                (DType::F16 | DType::BF16, Some(other)) if other == dtype => {}
                (DType::F16 | DType::BF16, Some(_)) => {
                    return Err(Diagnostic::error(
                        Code::TwoLowPrecisions,
                        "a plan cannot mix f16 and bf16",
                    )
                    .note("bf16 needs no loss scaling and f16 does")
                    .help(
                        "use one of them in `precision.compute`, every override, \
                             sharding.param_dtype and buffer_dtype, and the model's functions",
                    ));
                }
                _ => {
                    return Err(Diagnostic::error(
                        Code::ComputeDtype,
                        format!("cannot compute in {dtype}"),
                    )
                    .help("`precision.compute` is fp32, bf16 or fp16"));
                }
            }
        }
        Ok(low)
    }

    fn bound(
        &self,
        graph: &Graph,
        low: DType,
        stated: &HashMap<NodeId, DType>,
        context: &mut PassContext,
    ) -> HashMap<NodeId, Precision> {
        let mut bound = HashMap::new();
        let model = if self.pure { before_results(graph) } else { HashSet::new() };
        let of_integers =
            if self.pure { integers::made_of_large(graph, low) } else { HashSet::new() };
        let narrow = self.narrow_residual && self.compute == low;
        let stream = if narrow { residual::stream(graph) } else { HashMap::new() };
        for (id, node) in graph.nodes() {
            let class = node.op.precision().class;
            if class == Class::Fixed {
                continue;
            }
            if let Some(dtype) = stated.get(&id) {
                let low = *dtype == low;
                bound.insert(id, if low { Precision::Low } else { Precision::F32 });
                continue;
            }
            let Some(index) = self.overrides.iter().rposition(|o| o.applies(node)) else {
                if let Some(precision) = stream.get(&id) {
                    bound.insert(id, *precision);
                }
                if model.contains(&id) && !of_integers.contains(&id) {
                    // Sums of more elements than a low dtype counts.
                    let adds = matches!(
                        &node.op,
                        Op::ScatterElements(ScatterElements { f: ScatterFn::Add, .. })
                            | Op::ScatterNd(ScatterNd { f: ScatterFn::Add, .. })
                    );
                    bound.insert(id, if adds { Precision::F32ToLow } else { Precision::Low });
                }
                continue;
            };
            let chosen = &self.overrides[index];
            let (reads_f32, writes_f32) =
                (chosen.dtype == DType::F32, chosen.output.unwrap_or(chosen.dtype) == DType::F32);
            let precision = match (reads_f32, writes_f32) {
                (true, true) => Precision::F32,
                (true, false) => Precision::F32ToLow,
                (false, true) => Precision::LowToF32,
                (false, false) => Precision::Low,
            };
            if !reads_f32 && class == Class::F32 {
                let message = format!("{} is forced to {low}, which is not safe", node.op.name());
                let help = "leave it to the policy, or force only matmuls and convolutions";
                context.warn(
                    Diagnostic::new("L17", Severity::Warning, message).at(&node.origin).help(help),
                );
            }
            bound.insert(id, precision);
        }
        bound
    }

    /// Warns of overrides without effect: no node matches, or later overrides match all of its nodes.
    fn unused_overrides(&self, graph: &Graph, context: &mut PassContext) {
        let mut used = vec![false; self.overrides.len()];
        let nodes =
            || graph.nodes().map(|(_, n)| n).filter(|n| n.op.precision().class != Class::Fixed);
        for node in nodes() {
            if let Some(index) = self.overrides.iter().rposition(|o| o.applies(node)) {
                used[index] = true;
            }
        }
        for (o, _) in self.overrides.iter().zip(used).filter(|(_, used)| !used) {
            let (scope, op) = (o.scope.as_deref().unwrap_or("**"), o.op.as_deref().unwrap_or("*"));
            let message = format!("a precision override matches nothing: scope {scope}, op {op}");
            let of_scope =
                |n: &&Node| o.scope.is_none() || pattern::matches(scope, &n.origin.scope);
            let ops: Vec<&str> = nodes().filter(of_scope).map(|n| n.op.name()).collect();
            let help = match ops.is_empty() {
                true => nearest::advice(scope, nodes().map(|n| &*n.origin.scope)),
                false => nearest::advice(op, ops.iter().copied()),
            };
            context.warn(Diagnostic::warning(Code::OverrideUnused, message).help(help));
        }
    }
}

/// The nodes that the model's results depend on; later nodes belong to the loss.
fn before_results(graph: &Graph) -> HashSet<NodeId> {
    let of_model = |o: &&Output| o.kind == OutputKind::Result && o.name != STATISTICS;
    graph.ancestors(graph.outputs.iter().filter(of_model).map(|o| o.value))
}

/// The graph rebuilt with new dtypes.
struct Rebuild<'a> {
    old: &'a Graph,
    new: Graph,
    low: DType,
    assignment: &'a Assignment,
    options: &'a Autocast,
    /// New values by old ones.
    map: HashMap<ValueId, ValueId>,
    /// New leaves by old ones; the value that is used may be a cast of one.
    leaves: HashMap<ValueId, ValueId>,
    /// Casts by new value and dtype.
    casts: HashMap<(ValueId, DType), ValueId>,
}

impl<'a> Rebuild<'a> {
    fn new(old: &'a Graph, low: DType, assignment: &'a Assignment, options: &'a Autocast) -> Self {
        let mut new = Graph::new(&old.name);
        new.world_size = old.world_size;
        let (map, leaves, casts) = (HashMap::new(), HashMap::new(), HashMap::new());
        Rebuild { old, new, low, assignment, options, map, leaves, casts }
    }

    fn run(&mut self, context: &mut PassContext) -> Result<(), GraphError> {
        for (id, node) in self.old.nodes() {
            let mut inputs = Vec::with_capacity(node.inputs.len());
            for (i, &v) in node.inputs.iter().enumerate() {
                let dtype = self.operand_dtype(id, node, i);
                inputs.push(self.value_as(v, dtype, node, context)?);
            }
            let region = node.region;
            let mut op = node.op.clone();
            if self.assignment.get(&id) == Some(&Precision::LowToF32) {
                match &mut op {
                    Op::MatMul(op) => op.out = Some(DType::F32),
                    Op::Conv(op) => op.out = Some(DType::F32),
                    Op::ConvGradInput(op) => op.out = Some(DType::F32),
                    _ => {}
                }
            }
            let outputs = self.new.add(op, &inputs, node.origin.clone(), region)?;
            for (&old, new) in node.outputs.iter().zip(outputs) {
                if let Some(name) = &self.old.value(old).name {
                    self.new.set_name(new, name);
                }
                if node.op.is_leaf() {
                    self.leaves.insert(old, new);
                }
                let value = match self.written_as(id, node, old) {
                    Some(dtype) if dtype != self.new.ty(new).dtype => {
                        let origin = node.origin.by(INFO.name);
                        let op = Op::Cast(Cast { to: dtype });
                        let cast = self.new.add1(op, &[new], origin, node.region)?;
                        self.casts.insert((new, dtype), cast);
                        cast
                    }
                    _ => new,
                };
                self.map.insert(old, value);
            }
        }
        for output in &self.old.outputs {
            let dtype = self.old.ty(output.value).dtype;
            let node = self.old.def(output.value);
            let value = self.value_as(output.value, dtype, node, context)?;
            let kind = match output.kind {
                OutputKind::Carry(state) => OutputKind::Carry(self.leaves[&state]),
                other => other,
            };
            self.new.add_output(&output.name, value, kind);
        }
        Ok(())
    }

    /// The dtype in which all users read a result if it does not follow from the operands: that of an override, or of
    /// parameters and buffers.
    fn written_as(&self, id: NodeId, node: &Node, v: ValueId) -> Option<DType> {
        if !assign::subject(self.old, v) {
            return None;
        }
        if let Op::Param(param) = &node.op {
            let is_carried = || self.old.outputs.iter().any(|o| o.kind == OutputKind::Carry(v));
            return match param.kind {
                ParamKind::Buffer => self.options.buffer_dtype.filter(|_| !is_carried()),
                _ => self.options.param_dtype,
            };
        }
        match self.assignment.get(&id) {
            Some(Precision::LowToF32) => Some(DType::F32),
            Some(Precision::F32ToLow) if !assign::is_statistic(self.old, v) => Some(self.low),
            _ => None,
        }
    }

    /// The dtype in which a node reads its operand `i`.
    fn operand_dtype(&self, id: NodeId, node: &Node, i: usize) -> DType {
        let v = node.inputs[i];
        let own = self.old.ty(v).dtype;
        // An explicit cast, and what a function only refers to, take any dtype.
        let any = match &node.op {
            Op::Cast(_) => true,
            Op::CustomGradient(op) => i >= op.results,
            _ => false,
        };
        if !assign::subject(self.old, v) || any {
            return self.new.ty(self.map[&v]).dtype;
        }
        match self.assignment.get(&id) {
            Some(Precision::Low | Precision::LowToF32) if assign::reads(&node.op, i) => self.low,
            _ => own,
        }
    }

    /// The new value for an old one, in this dtype.
    fn value_as(
        &mut self,
        v: ValueId,
        dtype: DType,
        reader: &Node,
        context: &mut PassContext,
    ) -> Result<ValueId, GraphError> {
        let value = self.map[&v];
        if self.new.ty(value).dtype == dtype {
            return Ok(value);
        }
        if let Some(&cast) = self.casts.get(&(value, dtype)) {
            return Ok(cast);
        }
        let source = self.new.def(value);
        if matches!(source.op, Op::Cast(_)) {
            // Widened and rounded again: the value it was widened from.
            let narrow = self.new.ty(source.inputs[0]).dtype;
            if narrow == dtype && narrow.widens_to(self.new.ty(value).dtype) {
                return Ok(source.inputs[0]);
            }
        }
        let reader_region = reader.region;
        // A cast belongs to what it casts; of a leaf, which has no place of its own, to the reader.
        let place = if source.op.is_leaf() { &reader.origin } else { &source.origin };
        let origin = place.by(INFO.name);
        let op = match self.new.constant(value) {
            Some(constant) => {
                check_constant(constant, dtype, &origin, context);
                Op::Constant(Constant { value: limited(constant, dtype) })
            }
            None => Op::Cast(Cast { to: dtype }),
        };
        let inputs: &[ValueId] = if op.is_leaf() { &[] } else { &[value] };
        let (from, reader) = (&self.new.ty(value).clone(), &reader.op);
        let message = format!(
            "cast {from} to {dtype} for {} ({})",
            reader.name(),
            reader.precision().class.name()
        );
        context.remark(&origin, message);
        let cast = self.new.add1(op, inputs, origin, reader_region)?;
        self.casts.insert((value, dtype), cast);
        Ok(cast)
    }
}

/// A constant this large only excludes, as the fill of a mask: how large it is does not matter.
const FILL: f64 = 1e9;

/// The largest finite number of a low-precision type.
fn largest(dtype: DType) -> f64 {
    if dtype == DType::F16 { 65504.0 } else { 3.389_531_389_251_535_5e38 }
}

/// The constant in a low dtype; what is finite stays finite, or a row of masked scores would be NaN.
fn limited(constant: &Tensor, dtype: DType) -> Tensor {
    let (ty, max) = (constant.ty.with_dtype(dtype), largest(dtype));
    match constant.as_floats() {
        Some(values) if values.iter().any(|x| x.is_finite() && dtype.round(*x).is_infinite()) => {
            let limit = |x: &f64| if x.is_finite() { x.clamp(-max, max) } else { *x };
            Tensor::floats(dtype, ty.shape, values.iter().map(limit).collect())
        }
        _ => constant.cast(dtype),
    }
}

/// Warns of integers, such as positions, that rounding changes.
fn whole_numbers(constant: &Tensor, dtype: DType, origin: &Origin, context: &mut PassContext) {
    let Some(values) = constant.as_floats().filter(|v| v.iter().all(|x| x.fract() == 0.0)) else {
        return;
    };
    let changed = |x: &&f64| x.abs() < FILL && dtype.round(**x) != **x;
    if let Some(x) = values.iter().find(changed) {
        let message = format!("the integer {x} of a constant is {} in {dtype}", dtype.round(*x));
        let remedy = crate::lint::catalog::find("L21").remedy;
        context.warn(Diagnostic::new("L21", Severity::Warning, message).at(origin).help(remedy));
    }
}

/// Warns of a constant that loses its purpose by rounding.
fn check_constant(constant: &Tensor, dtype: DType, origin: &Origin, context: &mut PassContext) {
    whole_numbers(constant, dtype, origin, context);
    let lost = |x: &&f64| {
        x.is_finite() && **x != 0.0 && x.abs() < FILL && {
            let rounded = dtype.round(**x);
            rounded == 0.0 || rounded.is_infinite()
        }
    };
    let Some(x) = constant.as_floats().and_then(|v| v.iter().find(lost)) else { return };
    warn_of_lost(*x, dtype, origin, context);
}

/// Warns of a number that loses its purpose by rounding.
fn warn_of_lost(x: f64, dtype: DType, origin: &Origin, context: &mut PassContext) {
    let rounded = dtype.round(x).clamp(-largest(dtype), largest(dtype));
    let message = format!("the constant {x:e} is {rounded} in {dtype}");
    context.warn(
        Diagnostic::new("L18", Severity::Warning, message)
            .at(origin)
            .help("compute this node in fp32 with a precision override, or change the constant"),
    );
}
