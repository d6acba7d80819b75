//! What memory holds before a step: parameters, state, inputs, hyper-parameters, constants and tables.

use super::flat::{Flat, Piece, Table, What};
use super::memory::{Held, Memory};
use super::{Joined, Leaf, Machine, Stated, refused};
use frit_ir::ops::{Cast, Constant, Hyper, Input, Param, State};
use frit_ir::plan::{Group, GroupId, ParamHome, ParamSpec, Place, Plan};
use frit_ir::{DType, Graph, Op, Origin, Region, Tensor, TensorType, ValueId};
use std::collections::HashMap;
use std::rc::Rc;

impl<'a> Machine<'a> {
    pub(super) fn new(
        plan: &'a Plan,
        lowered: &Graph,
        constants: &HashMap<String, Tensor>,
        trained: Option<&Plan>,
    ) -> Stated<Machine<'a>> {
        let mut graph = Graph::new(&plan.name);
        graph.world_size = plan.world_size;
        let mut machine = Machine {
            plan,
            memory: Memory::new(plan),
            graph,
            region: Region::Forward,
            origin: Origin::none(),
            leaves: vec![],
            fed: plan.fed().map(|(buffer, _)| buffer).collect(),
            gradients: HashMap::new(),
            begun: HashMap::new(),
            changed: HashMap::new(),
            rows: rows(lowered),
            task_region: Region::Forward,
        };
        for group in plan.groups.keys() {
            machine.group(group, trained)?;
        }
        for param in &plan.params {
            if let ParamHome::Buffer(buffer) = param.home {
                let op = Op::Param(Param { unit: None, ..leaf_of(param, None) });
                machine.leaf(op, Place { buffer, offset: 0, ty: param.ty.clone() })?;
            }
        }
        for state in &plan.states {
            let (name, of, ty) = (state.name.clone(), None, state.ty.clone());
            let op = State { name, of, ty: ty.clone(), init: state.init, sharded: false };
            machine.leaf(Op::State(op), Place { buffer: state.buffer, offset: 0, ty })?;
        }
        for input in &plan.inputs {
            let op = Op::Input(Input { name: input.name.clone(), ty: input.ty.clone() });
            machine.fill(op, &Place { buffer: input.buffer, offset: 0, ty: input.ty.clone() })?;
        }
        for hyper in &plan.hyper {
            let value = machine
                .add(Op::Hyper(Hyper { name: hyper.name.clone(), default: hyper.value }), &[])?;
            machine.memory.fix(hyper.buffer, Held::Value(value[0], DType::F32));
        }
        for spec in &plan.constants {
            let value = constants.get(&spec.name).filter(|value| value.ty == spec.ty);
            let value = value.ok_or_else(|| refused(format!("`{}` has no value", spec.name)))?;
            let value = machine.add(Op::Constant(Constant { value: value.clone() }), &[])?;
            machine.memory.fix(spec.buffer, Held::Value(value[0], spec.ty.dtype));
        }
        machine.weigh(lowered)?;
        Ok(machine)
    }

    /// The weights of the examples of an evaluation, which are the input of the graph that the plan does not name.
    fn weigh(&mut self, graph: &Graph) -> Stated<()> {
        let plan = self.plan;
        let Some(place) = plan.eval.as_ref().and_then(|eval| eval.weights.as_ref()) else {
            return Ok(());
        };
        let is_other = |input: &Input| plan.inputs.iter().all(|own| own.name != input.name);
        let mut others = graph.nodes().filter_map(|(_, node)| match &node.op {
            Op::Input(input) if is_other(input) => Some(input.clone()),
            _ => None,
        });
        match (others.next(), others.next()) {
            (Some(input), None) => self.fill(Op::Input(input), place),
            _ => Err(refused("the graph has other inputs")),
        }
    }

    /// Puts the value of a leaf into its place.
    fn fill(&mut self, op: Op, place: &Place) -> Stated<()> {
        let value = self.add(op, &[])?[0];
        let flat = self.flat_of(value);
        self.memory.write(place, &Rc::new(flat))
    }

    /// A leaf that has a place for itself.
    fn leaf(&mut self, op: Op, place: Place) -> Stated<()> {
        let value = self.add(op, &[])?[0];
        self.memory.write(&place, &Rc::new(self.flat_of(value)))?;
        self.leaves.push(Leaf { value, place, begin: 0 });
        Ok(())
    }

    /// A flat group: its parameters, state, copies and tables.
    fn group(&mut self, id: GroupId, trained: Option<&Plan>) -> Stated<()> {
        let plan = self.plan;
        let group = &plan.groups[id];
        let part = |dtype, is_part: bool| {
            let numel = if is_part { group.shard_numel } else { group.numel };
            TensorType::new(dtype, [numel])
        };
        let between = gaps(plan, group, trained);
        let param = |spec: &ParamSpec| Op::Param(leaf_of(spec, Some((group, group.dtype))));
        let ty = part(group.dtype, true);
        let master = Place { buffer: group.master, offset: 0, ty };
        let masters = self.along(group, master, true, &between, param)?;
        for state in &group.states {
            let bytes = plan.buffers[state.buffer].bytes;
            let is_part = bytes == 4 * group.shard_numel;
            let place = Place { buffer: state.buffer, offset: 0, ty: part(DType::F32, is_part) };
            let leaf = |spec: &ParamSpec| {
                let of = Some(spec.name.clone());
                let ty = TensorType::new(DType::F32, spec.ty.shape.clone());
                let sharded = is_part && group.sharded;
                Op::State(State { name: state.name.clone(), of, ty, init: state.init, sharded })
            };
            let none = if state.init == 0.0 { &between } else { &Unread::All };
            self.along(group, place, is_part, none, leaf)?;
        }
        for copy in &group.copies {
            let mut pieces = masters.pieces.clone();
            for piece in &mut pieces {
                if let What::Of(value, from) = piece.what {
                    let cast = self.add(Op::Cast(Cast { to: copy.dtype }), &[value])?[0];
                    piece.what = What::Of(cast, from);
                }
            }
            let flat = Flat { dtype: copy.dtype, pieces, ..Flat::clone(&masters) };
            let place = Place { buffer: copy.buffer, offset: 0, ty: part(copy.dtype, true) };
            self.memory.write(&place, &Rc::new(flat))?;
        }
        if let Some(buffer) = group.param_group_offsets {
            self.memory.fix(buffer, Held::Table(Table::ParamGroups(id)));
        }
        if let Some(buffer) = group.param_offsets {
            self.memory.fix(buffer, Held::Table(Table::Params(id)));
        }
        Ok(())
    }

    /// A tensor that is parallel to a group, or to the part of it that a rank has, with a leaf for each parameter.
    fn along(
        &mut self,
        group: &Group,
        place: Place,
        is_part: bool,
        between: &Unread,
        leaf: impl Fn(&ParamSpec) -> Op,
    ) -> Stated<Rc<Flat>> {
        let plan = self.plan;
        let (mut pieces, mut end) = (vec![], 0);
        for segment in &group.segments {
            between.fill(&mut pieces, end..segment.offset);
            let op = leaf(&plan.params[segment.param]);
            let value: ValueId = self.add(op, &[])?[0];
            let numel = self.numel(value);
            if numel != segment.numel || segment.offset < end {
                return Err(refused("a parameter has another size in its group"));
            }
            let begin = segment.offset;
            if numel > 0 {
                pieces.push(Piece { begin, numel, what: What::Of(value, 0) });
            }
            self.leaves.push(Leaf { value, place: place.clone(), begin });
            end = begin + numel;
        }
        between.fill(&mut pieces, end..group.numel);
        let shards = if is_part { group.shards() } else { 1 };
        let dtype = place.ty.dtype;
        let flat = Rc::new(Flat {
            dtype,
            numel: group.numel,
            shards,
            pieces,
            gradients: None,
            resharded: false,
        });
        self.memory.write(&place, &flat)?;
        Ok(flat)
    }
}

/// The shapes of the rows of concatenations. One whose operands are written into its place is known by their sizes, by who reads it or a
/// reshape of it, and in which shape; read as rows of another size, it is the same, but not recognized as that by its form. Of several that
/// differ only in their rows, none is known.
fn rows(graph: &Graph) -> HashMap<Joined, Option<Vec<usize>>> {
    let users = graph.users();
    let mut rows = HashMap::new();
    for (_, node) in graph.nodes() {
        let Op::Concat(concat) = &node.op else { continue };
        let dims = graph.ty(node.outputs[0]).shape.dims();
        let sizes: Vec<usize> = node.inputs.iter().map(|v| graph.ty(*v).shape.numel()).collect();
        let row = dims[concat.axis + 1..].to_vec();
        let mut views = vec![node.outputs[0]];
        while let Some(value) = views.pop() {
            for user in users[value.0 as usize].iter().map(|id| graph.node(*id)) {
                if let Op::Reshape(_) = user.op {
                    views.push(user.outputs[0]);
                    continue;
                }
                let shape = graph.ty(value).shape.clone();
                let joined = (sizes.clone(), shape, user.region, user.origin.clone());
                let known = rows.entry(joined).or_insert_with(|| Some(row.clone()));
                if known.as_ref() != Some(&row) {
                    *known = None;
                }
            }
        }
    }
    rows
}

/// The leaf of a parameter, that is of a group and held in this dtype.
fn leaf_of(spec: &ParamSpec, group: Option<(&Group, DType)>) -> Param {
    let held = group.map(|(_, dtype)| dtype).filter(|dtype| *dtype != spec.ty.dtype);
    Param {
        name: spec.name.clone(),
        ty: spec.ty.clone(),
        kind: spec.kind,
        reason: spec.reason.clone(),
        init: spec.init.clone(),
        held,
        unit: group.map(|(group, _)| group.unit),
        sharded: group.is_some_and(|(group, _)| group.sharded),
    }
}

/// Elements of a group that are of no parameter.
enum Unread {
    /// They are zero, but for these.
    But(Vec<std::ops::Range<usize>>),
    /// They may be anything.
    All,
}

impl Unread {
    /// Fills a gap between the pieces of parameters.
    fn fill(&self, pieces: &mut Vec<Piece>, gap: std::ops::Range<usize>) {
        let mut begin = gap.start;
        let mut push = |begin: &mut usize, end: usize, what: What| {
            if *begin < end {
                pieces.push(Piece { begin: *begin, numel: end - *begin, what });
                *begin = end;
            }
        };
        if let Unread::But(others) = self {
            for other in others.iter().filter(|o| o.start < gap.end && gap.start < o.end) {
                push(&mut begin, other.start.min(gap.end), What::Zero);
                push(&mut begin, other.end.min(gap.end), What::Unknown);
            }
            push(&mut begin, gap.end, What::Zero);
        }
        push(&mut begin, gap.end, What::Unknown);
    }
}

/// What is known of the gaps of a group: a training keeps zeros there, and its evaluation has gaps for parameters that it does not read.
fn gaps(plan: &Plan, group: &Group, trained: Option<&Plan>) -> Unread {
    let Some(trained) = trained else { return Unread::But(vec![]) };
    let Some(first) = group.segments.first() else { return Unread::All };
    let name = &plan.params[first.param].name;
    let of = |other: &&Group| {
        other
            .segments
            .iter()
            .any(|s| trained.params[s.param].name == *name && s.offset == first.offset)
    };
    match trained.groups.iter().find(of).filter(|other| other.numel == group.numel) {
        Some(other) => {
            Unread::But(other.segments.iter().map(|s| s.offset..s.offset + s.numel).collect())
        }
        None => Unread::All,
    }
}
