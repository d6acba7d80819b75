//! Lowers the graph to a plan: assigns values to buffers and turns nodes into tasks.
//!
//! In: a fused graph. Out: a plan whose tasks are in graph order and assigned to streams, without waits and offsets; `schedule` and
//! `memory` complete it.
//!
//! Parameters, their gradients and their optimizer state are in flat groups ([`groups`]). Work on sharded values
//! (casting a shard, statistics, the optimizer) is done once per group, not once per parameter ([`flat`]), and so are
//! the reduction and accumulation of gradients ([`gradients`]). A kernel writes its gradient directly into the group's
//! flat gradient, and reads a gathered parameter directly from the gathered buffer: there are no copies.

mod adafactor;
mod body;
mod copies;
mod evaluation;
mod finish;
mod flat;
mod gradients;
mod groups;
mod in_place;
mod kernels;
mod leaves;
mod muon;
mod optimizer;
mod padding;
mod parts;
mod reshard;
#[cfg(test)]
mod tests;
mod written;

use crate::Property;
use crate::cost::collective::exchange_of;
use crate::cost::{Cluster, Members};
use crate::loss::Term;
use copies::Copies;
use frit_ir::ops::{AllReduce, FusionKind, ReduceKind};
use frit_ir::plan::{
    Action, Addresses, Arena, Buffer, BufferClass, BufferId, CUDA_OPERAND_ALIGNMENT, Entry,
    FORMAT_VERSION, GroupId, KernelId, KernelKind, MetricSpec, Phase, PhaseName, Place, Plan,
    Strategy, Stream, Target, Task, TaskId, TiVec, UnitId, UnitSpec, provenance,
};
use frit_ir::sharding::sharded_values;
use frit_ir::{
    Code, DType, Diagnostic, Graph, Node, NodeId, Op, Origin, Region, Tensor, TensorType, ValueId,
};
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};

/// Properties that lowering requires.
pub const REQUIRES: &[Property] =
    &[Property::IndexRanges, Property::Stripped, Property::Updated, Property::Sharded];

/// The part of an activation that slices must keep to be views of it.
const VIEWED_PART: f64 = 0.875;

/// Selects an entry, with the generated kernels that it launches: their bodies and how they are compiled.
pub type Select<'a> =
    dyn Fn(&Graph, KernelKind, FusionKind) -> (Entry, Vec<(Graph, FusionKind)>) + 'a;

/// Inputs of lowering besides the graph.
pub struct LowerOptions<'a> {
    /// The units formed by `shard`.
    pub units: TiVec<UnitId, UnitSpec>,
    /// Sharding strategy.
    pub strategy: Strategy,
    /// The autocast dtype.
    pub compute_dtype: DType,
    /// Seed of initialization and shuffling.
    pub seed: u64,
    /// Whether every run computes the same bits.
    pub deterministic: bool,
    /// Micro-steps per step.
    pub accumulation: usize,
    /// See [`Plan::reproducible`].
    pub reproducible: Option<usize>,
    /// Ranks among which one copy of the sharded state is divided.
    pub shards: usize,
    /// Whether sharded parameters are gathered once per step, before its micro-steps.
    pub gather_once: bool,
    /// Whether one kernel may step several flat groups: not if their state comes from the host group by group.
    pub multi_tensor: bool,
    /// Whether optimizer steps may write parameters in other dtypes too: not if the parameters are on the host.
    pub copies: bool,
    /// Loss elements of one rank's micro-batch.
    pub loss_capacity: usize,
    /// The training plan of an evaluation; parameters have the same layout in both.
    pub trained: Option<&'a Plan>,
    /// The losses, for an evaluation.
    pub losses: Vec<Term>,
    /// Metrics of an evaluation besides the losses.
    pub metrics: Vec<MetricSpec>,
    /// Target of the plan.
    pub target: Target,
    /// The cluster for which durations are predicted.
    pub cluster: &'a Cluster,
    /// The resolved configuration, as TOML.
    pub config: String,
    /// Version of the compiler.
    pub frit_version: String,
    /// Whether code generation compiles a region.
    pub generated: &'a dyn Fn(&Graph, FusionKind) -> bool,
    /// Whether a hand-written kernel executes a body.
    pub library: &'a dyn Fn(&Graph) -> bool,
    /// The entry that executes a body of this kernel kind and, for generated code, fusion kind; the symbol lacks only
    /// the suffix of each launch. Its launches name generated kernels by their index among those that come with it, see
    /// [`Launches::link`](frit_ir::plan::Launches::link).
    pub entry: &'a Select<'a>,
}

/// A plan, and the elements of its large constants by name.
pub struct Lowered {
    /// The plan, without schedule and offsets.
    pub plan: Plan,
    /// Constants for the weights file.
    pub constants: Vec<(String, Tensor)>,
    /// Kernels that code generation must compile, and how.
    pub regions: Vec<(KernelId, FusionKind)>,
}

/// Lowers a training graph, or an evaluation graph to a plan with the single phase `eval`.
///
/// # Errors
/// If the graph contains something that plans cannot express, with its node.
pub fn lower(graph: &Graph, options: &LowerOptions<'_>) -> Result<Lowered, Diagnostic> {
    // What no output depends on must not decide how the parameters of a group are stepped.
    let graph = &without_dead_work(graph);
    optimizer::check_carried(graph)?;
    let lowered = with_copies(graph, options, Copies::All)?;
    let (all, kept) = copies::within_peak(&lowered.plan);
    if kept.len() == all {
        return Ok(lowered);
    }
    with_copies(graph, options, Copies::Only(kept))
}

/// The graph without nodes on which no output depends; leaves stay.
fn without_dead_work(graph: &Graph) -> Cow<'_, Graph> {
    let live = graph.ancestors(graph.outputs.iter().map(|o| o.value));
    let dead = graph.nodes().filter(|(id, node)| !node.op.is_leaf() && !live.contains(id));
    let dead: Vec<NodeId> = dead.map(|(id, _)| id).collect();
    if dead.is_empty() {
        return Cow::Borrowed(graph);
    }
    let mut graph = graph.clone();
    dead.into_iter().for_each(|id| graph.remove(id));
    Cow::Owned(graph)
}

/// The plan in which optimizer steps write these copies of parameters.
fn with_copies(
    graph: &Graph,
    options: &LowerOptions<'_>,
    copies: Copies,
) -> Result<Lowered, Diagnostic> {
    let mut lowering = Lowering::new(graph, options, copies);
    lowering.make_groups()?;
    if evaluation::is_evaluation(graph) {
        lowering.place_parts();
        lowering.evaluation()?;
        return Ok(lowering.finish());
    }
    if !graph.nodes().any(|(_, node)| seeds(&node.op)) {
        let message = "no parameter is trained: all gradients are zero, whatever the data";
        return Err(Diagnostic::error(Code::NothingTrains, message)
            .help("check what the model multiplies by zero, clips or detaches between its parameters and the loss"));
    }
    lowering.casts_together = lowering.joins_casts()?;
    lowering.place_leaves()?;
    lowering.place_gradients()?;
    lowering.place_parts();
    lowering.place_metrics();
    let is_gather = |n: &Node| matches!(n.op, Op::AllGather(_)) && n.region == Region::Forward;
    if options.gather_once {
        lowering.unsharding = true;
        lowering.nodes(is_gather)?;
        lowering.unsharding = false;
        lowering.end_phase(PhaseName::Unshard);
    }
    lowering.nodes(|n| n.region != Region::Update)?;
    lowering.finish_micro_step()?;
    lowering.end_phase(PhaseName::MicroStep);
    let is_reduction = |n: &Node| {
        n.region == Region::Update
            && matches!(
                &n.op,
                Op::ReduceScatter(_) | Op::AllReduce(AllReduce { unit: Some(_), .. })
            )
    };
    lowering.nodes(is_reduction)?;
    lowering.note_gradients()?;
    if lowering.plan.tasks.next_key() > lowering.phase_begin() {
        lowering.end_phase(PhaseName::Reduce);
    }
    lowering.nodes(|n| n.region == Region::Update && !is_reduction(n))?;
    lowering.finish_steps()?;
    lowering.finish_update()?;
    lowering.end_phase(PhaseName::Update);
    Ok(lowering.finish())
}

/// Whether the backward pass begins here; canonicalization may have removed everything that depends on it.
fn seeds(op: &Op) -> bool {
    match op {
        Op::LossScale(_) => true,
        Op::Fusion(fusion) => fusion.body.nodes().any(|(_, node)| seeds(&node.op)),
        _ => false,
    }
}

/// The node that computes the gradient which `node` reduces, if it is such a reduction.
fn reduced_operand(graph: &Graph, node: &Node) -> Option<NodeId> {
    let reduces = match &node.op {
        Op::ReduceScatter(_) => true,
        Op::AllReduce(r) => r.unit.is_some(),
        _ => false,
    };
    let operand = graph.value(*node.inputs.first()?).def;
    (reduces && !graph.node(operand).op.is_leaf()).then_some(operand)
}

pub(crate) fn internal(message: impl Into<String>) -> Diagnostic {
    Diagnostic::error(Code::PassFailed, format!("internal error in lowering: {}", message.into()))
        .help("this is a bug in frit; please report it with the model")
}

/// Identity of a gathered copy of a group: its dtype, and the region that reads it.
type GatherKey = (GroupId, DType, Region);

struct Lowering<'a> {
    graph: &'a Graph,
    options: &'a LowerOptions<'a>,
    cluster: &'a Cluster,
    /// Predicted microseconds of each kernel.
    kernel_us: TiVec<KernelId, f64>,
    plan: Plan,
    constants: Vec<(String, Tensor)>,
    regions: Vec<(KernelId, FusionKind)>,
    places: HashMap<ValueId, Place>,
    written: written::Written,
    /// Where a value must be written, if that is fixed.
    required: HashMap<ValueId, Place>,
    sharded: Vec<bool>,
    /// Where the update writes metrics, by value.
    metrics: HashMap<ValueId, Place>,
    /// Readers of every value.
    users: Vec<Vec<NodeId>>,
    kernel_of_body: HashMap<(KernelKind, String), KernelId>,
    /// Group and index into its segments, by parameter name.
    group_of: HashMap<String, (GroupId, usize)>,
    /// The parameter to which a sharded value belongs.
    param_of: HashMap<ValueId, String>,
    gathered: HashMap<GatherKey, BufferId>,
    shard_casts: HashMap<(GroupId, DType), BufferId>,
    /// Casts of parameters that are whole on every rank, by group: buffer and first element.
    param_casts: HashMap<(GroupId, DType), (BufferId, usize)>,
    /// The copies of parameters that optimizer steps write.
    copies: Copies,
    /// Whether parameters of all groups are cast at once: a training step reads all of them in backward, and a kernel can.
    casts_together: bool,
    /// The float types to which parameters that are whole on every rank are cast, by name.
    cast_dtypes: HashMap<&'a str, BTreeSet<DType>>,
    /// Elements of zeros that follow padded parameters, by name.
    rooms: HashMap<&'a str, usize>,
    gradient: gradients::Gradients,
    /// Whether the current tasks run once, before the micro-steps.
    unsharding: bool,
    /// The parameter groups.
    param_groups: optimizer::ParamGroups,
    /// Steps of flat groups, and those of their moving averages, which are emitted at the end of the update.
    steps: Vec<optimizer::Step<'a>>,
    averages: Vec<optimizer::Step<'a>>,
    /// Nodes that are one task for all parameters of a group, by group, operation and region: how many were seen, and the first.
    seen: HashMap<(GroupId, &'static str, Region), (usize, &'a Node)>,
    /// Sums over ranks that Adafactor's steps read, by group and segment.
    adafactor: HashMap<(GroupId, usize), adafactor::Summed>,
    /// The directions in which Muon steps each group.
    muon: HashMap<GroupId, Place>,
}

impl<'a> Lowering<'a> {
    /// The plan, with the digests of its tasks.
    fn finish(mut self) -> Lowered {
        self.keep_parts();
        let (operands, state) = provenance(&self.plan, Addresses::Apart);
        self.plan.state_digest = state;
        for (task, digest) in self.plan.tasks.iter_mut().zip(operands) {
            task.operands_digest = digest;
        }
        Lowered { plan: self.plan, constants: self.constants, regions: self.regions }
    }

    fn new(graph: &'a Graph, options: &'a LowerOptions<'a>, copies: Copies) -> Self {
        let plan = Plan {
            format_version: FORMAT_VERSION,
            frit_version: options.frit_version.clone(),
            name: graph.name.clone(),
            config: options.config.clone(),
            target: options.target.clone(),
            world_size: graph.world_size,
            accumulation: options.accumulation,
            strategy: options.strategy,
            compute_dtype: options.compute_dtype,
            seed: options.seed,
            deterministic: options.deterministic,
            reproducible: options.reproducible,
            shuffle: false,
            drop_last: true,
            validation: None,
            loss_capacity: options.loss_capacity,
            inputs: vec![],
            params: Default::default(),
            units: options.units.clone(),
            groups: Default::default(),
            states: vec![],
            hyper: vec![],
            constants: vec![],
            persistent_bytes: 0,
            workspace_bytes: 0,
            host_bytes: 0,
            workspace_lower_bound: 0,
            buffers: Default::default(),
            kernels: Default::default(),
            object: None,
            phases: Default::default(),
            tasks: Default::default(),
            metrics: vec![],
            state_digest: String::new(),
            gradients: vec![],
            cast_baseline: Default::default(),
            model_bytes: 0,
            least_bytes: 0,
            pass_trace: None,
            eval: None,
            reports: vec![],
            lints: vec![],
        };
        Lowering {
            graph,
            options,
            cluster: options.cluster,
            kernel_us: TiVec::new(),
            plan,
            constants: vec![],
            regions: vec![],
            places: HashMap::new(),
            written: written::Written::default(),
            required: HashMap::new(),
            metrics: HashMap::new(),
            sharded: sharded_values(graph),
            users: graph.users(),
            kernel_of_body: HashMap::new(),
            group_of: HashMap::new(),
            param_of: HashMap::new(),
            gathered: HashMap::new(),
            shard_casts: HashMap::new(),
            param_casts: HashMap::new(),
            copies,
            casts_together: false,
            cast_dtypes: flat::param_cast_dtypes(graph),
            rooms: padding::rooms(graph),
            gradient: gradients::Gradients::default(),
            unsharding: false,
            param_groups: optimizer::ParamGroups::new(graph),
            steps: vec![],
            averages: vec![],
            seen: HashMap::new(),
            adafactor: HashMap::new(),
            muon: HashMap::new(),
        }
    }

    fn buffer(&mut self, name: &str, arena: Arena, class: BufferClass, bytes: usize) -> BufferId {
        self.plan.buffers.push_and_get_key(Buffer {
            name: name.into(),
            arena,
            class,
            offset: 0,
            bytes,
        })
    }

    fn is_sharded(&self, value: ValueId) -> bool {
        self.sharded[value.0 as usize]
    }

    fn phase_begin(&self) -> TaskId {
        self.plan.phases.last().map_or(TaskId::FIRST, |p| p.end)
    }

    /// Ends a phase after the tasks so far.
    fn end_phase(&mut self, name: PhaseName) {
        let (begin, end) = (self.phase_begin(), self.plan.tasks.next_key());
        self.plan.phases.push(Phase { name, begin, end });
    }

    /// Lowers the nodes that satisfy the predicate. A gradient's reduction is issued as soon as its operand is
    /// computed, wherever it stands in the graph.
    fn nodes(&mut self, which: impl Fn(&Node) -> bool) -> Result<(), Diagnostic> {
        let graph = self.graph;
        let chosen: HashSet<NodeId> =
            graph.nodes().filter(|(_, n)| which(n)).map(|(id, _)| id).collect();
        let mut reductions: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
        let mut followers: HashSet<NodeId> = HashSet::new();
        for (id, node) in graph.nodes().filter(|(id, _)| chosen.contains(id)) {
            let operand = reduced_operand(graph, node).filter(|o| chosen.contains(o));
            if let Some(operand) = operand {
                reductions.entry(operand).or_default().push(id);
                followers.insert(id);
            }
        }
        for &id in graph.order().iter().filter(|id| chosen.contains(id) && !followers.contains(id))
        {
            let mut next = vec![id];
            while let Some(id) = next.pop() {
                self.node(graph.node(id))?;
                next.extend(reductions.get(&id).into_iter().flatten().rev());
            }
        }
        Ok(())
    }

    /// Lowers one node that is no leaf.
    fn node(&mut self, node: &'a Node) -> Result<(), Diagnostic> {
        if node.op.is_leaf() {
            return Ok(());
        }
        for value in &node.inputs {
            if let Some(place) = self.places.get(value) {
                self.check_unwritten(*value, place)?;
            }
        }
        self.work(node)?;
        self.note_results(node);
        Ok(())
    }

    /// The tasks of one node.
    fn work(&mut self, node: &'a Node) -> Result<(), Diagnostic> {
        match &node.op {
            Op::AllGather(_) => self.gather(node),
            Op::ReduceScatter(_) => self.gradient_step(node),
            Op::AllReduce(r) if r.unit.is_some() => self.gradient_step(node),
            Op::AllReduce(r) => self.reduce_statistics(node, r.reduce),
            Op::GradStats(op) => self.grad_stats(node, *op),
            Op::OptimizerStep(_) => self.optimizer_step(node),
            Op::EmaStep => self.ema_step(node),
            _ if self.is_grad_sum(node) => self.gradient_step(node),
            _ if node.inputs.iter().any(|v| self.is_sharded(*v)) => self.sharded_cast(node),
            Op::Reshape(_) | Op::Slice(_) if self.alias(node) => Ok(()),
            Op::Pad(_) if self.alias_padded(node) => Ok(()),
            Op::Concat(_) if self.is_in_place(node) => Ok(()),
            _ if self.cast_with_group(node)? => Ok(()),
            _ => self.kernel_task(node),
        }
    }

    /// Makes a reshape, a slice of an input, or slices that together keep almost all of an activation, views of their
    /// operand (a view keeps the whole operand alive). Returns false if the result must be written elsewhere.
    fn alias(&mut self, node: &Node) -> bool {
        let Some(place) = self.places.get(&node.inputs[0]) else { return false };
        let ty = self.graph.ty(node.outputs[0]).clone();
        let Some(skipped) = in_place::elements_before(&node.op, &place.ty) else { return false };
        let offset = place.offset + skipped * ty.dtype.size();
        let is_slice = matches!(node.op, Op::Slice(_));
        let users = &self.users[node.inputs[0].0 as usize];
        let keeps_most = match self.plan.buffers[place.buffer].class {
            BufferClass::Input => true,
            BufferClass::Activation => {
                in_place::part_in_views(self.graph, users, &place.ty) >= VIEWED_PART
            }
            _ => false,
        };
        if is_slice && !(keeps_most && offset.is_multiple_of(CUDA_OPERAND_ALIGNMENT)) {
            return false;
        }
        let place = Place { ty, offset, ..place.clone() };
        match self.required.get(&node.outputs[0]) {
            Some(required) if *required != place => false,
            _ => {
                self.places.insert(node.outputs[0], place);
                true
            }
        }
    }

    /// The place of a value that was lowered before.
    fn place(&mut self, value: ValueId) -> Result<Place, Diagnostic> {
        if let Some(place) = self.places.get(&value) {
            self.check_unwritten(value, place)?;
            return Ok(place.clone());
        }
        if let Some(constant) = self.graph.constant(value) {
            let place = self.constant(&constant.clone());
            self.places.insert(value, place.clone());
            return Ok(place);
        }
        let node = self.graph.def(value);
        Err(internal(format!("a result of `{}` has no place", node.op.name())).at(&node.origin))
    }

    /// A place for a result: the required one, or a new buffer.
    fn result(&mut self, value: ValueId, node: &Node) -> Place {
        let ty = self.graph.ty(value).clone();
        let place = self.required.get(&value).cloned().unwrap_or_else(|| {
            let name = self.graph.value(value).name.as_deref().unwrap_or("").to_string();
            let name = if name.is_empty() { label(node) } else { name };
            self.workspace(&name, BufferClass::Activation, ty)
        });
        self.places.insert(value, place.clone());
        place
    }

    fn workspace(&mut self, name: &str, class: BufferClass, ty: TensorType) -> Place {
        let buffer = self.buffer(name, Arena::Workspace, class, ty.bytes());
        Place { buffer, offset: 0, ty }
    }

    /// A task that runs a node, or a fusion, as one kernel.
    fn kernel_task(&mut self, node: &'a Node) -> Result<(), Diagnostic> {
        let (mut body, mut operands) = body::of_node(self.graph, node, true)?;
        let mut kind = self.kernel_kind(node, &body);
        if kind == KernelKind::Interpreted {
            // A hand-written kernel reads constants like other operands.
            let (whole, all) = body::of_node(self.graph, node, false)?;
            if self.kernel_kind(node, &whole) == KernelKind::Library {
                (body, operands, kind) = (whole, all, KernelKind::Library);
            }
        }
        let region = match &node.op {
            Op::Fusion(fusion) => fusion.kind,
            _ => FusionKind::Pointwise,
        };
        let mut reads = Vec::new();
        for &value in &operands {
            reads.push(self.place(value)?);
        }
        let in_place = match kind {
            KernelKind::Generated => in_place::logits_and_gradient(&body),
            KernelKind::Library => in_place::matrix_and_sum(&body),
            KernelKind::Interpreted => None,
        };
        if let Some((operand, result)) = in_place
            && in_place::is_read_once(self.graph, &self.users, operands[operand])
            && self.plan.buffers[reads[operand].buffer].class == BufferClass::Activation
        {
            self.required.entry(node.outputs[result]).or_insert_with(|| reads[operand].clone());
        }
        let writes = node.outputs.iter().map(|v| self.result(*v, node)).collect();
        self.run_kernel(kind, region, body, reads, writes, node);
        Ok(())
    }

    fn kernel_kind(&self, node: &Node, body: &Graph) -> KernelKind {
        let generated = |kind| (self.options.generated)(body, kind);
        match &node.op {
            Op::Fusion(f) if !f.kind.is_library() && generated(f.kind) => KernelKind::Generated,
            _ if (self.options.library)(body) => KernelKind::Library,
            Op::Fusion(_) => KernelKind::Interpreted,
            _ if generated(FusionKind::Pointwise) => KernelKind::Generated,
            _ => KernelKind::Interpreted,
        }
    }

    /// Appends a task other than a kernel.
    fn task(
        &mut self,
        name: &str,
        stream: Stream,
        region: Region,
        origin: &Origin,
        action: Action,
    ) {
        let touched: usize =
            action.reads().iter().chain(&action.writes()).map(|p| p.ty.bytes()).sum();
        let cost_us = match exchange_of(&action) {
            Some(_) => self.exchange_us(&action),
            None => 1e6 * self.cluster.device.copy_seconds(touched as u64),
        };
        let lowered = self.plan.tasks.len();
        action.writes().iter().for_each(|place| self.written.write(place, lowered));
        self.plan.tasks.push(Task {
            lowered,
            operands_digest: String::new(),
            name: name.into(),
            stream,
            region,
            origin: origin.clone(),
            action,
            waits: vec![],
            flops: 0,
            bytes: touched as u64,
            cost_us,
        });
    }

    /// Predicted microseconds of a collective; 0 if it is not a collective.
    fn exchange_us(&self, action: &Action) -> f64 {
        exchange_of(action).map_or(0.0, |(exchange, bytes)| {
            let members = Members::of(&self.plan, action);
            1e6 * self.cluster.exchange(exchange, bytes, members).seconds
        })
    }

    fn reduce_statistics(&mut self, node: &Node, reduce: ReduceKind) -> Result<(), Diagnostic> {
        let send = self.place(node.inputs[0])?;
        let recv = self.result(node.outputs[0], node);
        let action = Action::AllReduce { group: None, reduce, send, recv };
        self.task("all_reduce statistics", Stream::Reduce, node.region, &node.origin, action);
        Ok(())
    }
}

fn label(node: &Node) -> String {
    match (&*node.origin.source, &*node.origin.scope) {
        ("", "") => node.op.name().into(),
        ("", scope) => format!("{scope} {}", node.op.name()),
        (source, _) => source.to_string(),
    }
}
