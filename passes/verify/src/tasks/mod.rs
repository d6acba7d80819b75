//! What the tasks of a plan compute, as a graph.
//!
//! The tasks are executed symbolically in list order: [`memory`] follows what every byte holds, [`body`] the operations of kernels. Parts of
//! flat groups are wholes here, as in the graph that is lowered: what ranks do to their parts is done to every parameter. The step is
//! executed once, with one micro-step, from what its leaves hold; that a micro-step leaves everything else as it found it, and a step all
//! that the next one begins with, is checked, so every micro-step and every step is this one.
//!
//! That the plan allows no other order of reads and writes than that of its list is what `verify_plan` proves.

mod body;
mod flat;
mod leaves;
mod memory;
mod outputs;
mod rules;

use crate::reading::Ranks;
use crate::unstated::Unstated;
use flat::{Flat, What};
use frit_ir::ops::{AllGather, AllReduce, ReduceScatter};
use frit_ir::plan::{Action, BufferId, Group, GroupId, PhaseName, Place, Plan, Task};
use frit_ir::{Graph, Op, Origin, Region, Shape, Tensor, ValueId};
use memory::{Content, Memory};
use std::collections::HashMap;
use std::rc::Rc;

/// What is said of a plan, or why nothing is.
type Stated<T> = Result<T, Unstated>;

/// Of such a part a graph says that it is whole, so nothing may be added up over ranks of it.
const KEPT: &str = "a part of what every rank had is read as one of a group";

fn refused(why: impl Into<String>) -> Unstated {
    Unstated::new("tasks", &Origin::none(), why)
}

/// What the tasks of a plan are compared with, and what they compute.
pub struct Tasks {
    /// The graph that is lowered to the plan, with whole gradients.
    pub expected: Graph,
    /// The graph of the tasks.
    pub computed: Graph,
}

impl Tasks {
    /// Of the plan that a graph is lowered to, for these ranks. `constants` are the values of the plan's constants by name; `trained` is the training plan
    /// beside an evaluation.
    ///
    /// # Errors
    /// If what a task computes cannot be written as a graph, or a step does not leave what the next one needs.
    pub fn new(
        plan: &Plan,
        graph: &Graph,
        constants: &HashMap<String, Tensor>,
        (ranks, trained): (Ranks, Option<&Plan>),
    ) -> Result<Tasks, Unstated> {
        let is_of = |group: &Group| {
            let shards = if group.sharded { ranks.shards } else { 1 };
            group.shards() == shards && group.shard_numel * shards == group.numel
        };
        if plan.world_size != ranks.number() || !plan.groups.iter().all(is_of) {
            return Err(refused("the plan is one of other ranks"));
        }
        let mut machine = Machine::new(plan, graph, constants, trained)?;
        machine.run()?;
        machine.outputs(graph)
    }
}

/// Executes the tasks of a plan symbolically.
struct Machine<'a> {
    plan: &'a Plan,
    memory: Memory<'a>,
    graph: Graph,
    /// Where nodes are added: of the task that is executed, whether it is of the update, and its origin.
    region: Region,
    origin: Origin,
    /// The leaves of parameters and state, and where they are.
    leaves: Vec<Leaf>,
    /// Buffers that are fed before every micro-step.
    fed: Vec<BufferId>,
    /// The gradients of each group, when they are reduced.
    gradients: HashMap<GroupId, Rc<Flat>>,
    /// What leaves hold when a micro-step begins, by buffer.
    begun: HashMap<BufferId, Rc<Flat>>,
    /// What those become by it which it changes.
    changed: HashMap<BufferId, Rc<Flat>>,
    /// See [`leaves::rows`].
    rows: HashMap<Joined, Option<Vec<usize>>>,
    /// The region that the task itself names, which tells rows of a forward from those of a backward pass.
    task_region: Region,
}

/// A concatenation as it is read: the sizes of its parts, its shape, and where that is.
type Joined = (Vec<usize>, Shape, Region, Origin);

/// A parameter, or state, that is kept in memory.
struct Leaf {
    /// Its node.
    value: ValueId,
    /// All that is kept at its place.
    place: Place,
    /// The first element of all ranks there that is its own.
    begin: usize,
}

impl<'a> Machine<'a> {
    fn add(&mut self, op: Op, inputs: &[ValueId]) -> Stated<Vec<ValueId>> {
        Ok(self.graph.add(op, inputs, self.origin.clone(), self.region)?)
    }

    fn run(&mut self) -> Stated<()> {
        let plan = self.plan;
        let has_reduce = plan.phase(PhaseName::Reduce).is_some();
        for phase in &plan.phases {
            let repeats = phase.name == PhaseName::MicroStep;
            if repeats {
                let within = |leaf: &&Leaf| self.state(leaf).is_some_and(|s| !s.is_per_element());
                let within = self.leaves.iter().filter(within).map(|leaf| leaf.place.buffer);
                let changing: Vec<BufferId> = within.chain(self.fed.iter().copied()).collect();
                self.memory.begin_repeated(&changing)?;
                self.begun = self.held()?;
            }
            for task in phase.tasks().map(|i| &plan.tasks[i]) {
                let of_update = matches!(phase.name, PhaseName::Reduce | PhaseName::Update);
                self.region = if of_update { Region::Update } else { Region::Forward };
                self.origin = task.origin.clone();
                self.task_region = task.region;
                self.task(task).map_err(|unstated| Unstated {
                    origin: task.origin.clone(),
                    reason: format!("task `{}`: {}", task.name, unstated.reason),
                    ..unstated
                })?;
            }
            if repeats {
                let leaves = self.leaves.iter().map(|leaf| leaf.place.buffer);
                let own: Vec<BufferId> = leaves.chain(self.fed.iter().copied()).collect();
                self.memory.end_repeated(&own)?;
                self.keep()?;
            }
            if phase.name == PhaseName::Reduce || repeats && !has_reduce {
                for gradient in &plan.gradients {
                    let flat = self.flat(&gradient.place)?;
                    self.gradients.insert(gradient.group, flat);
                }
            }
        }
        self.memory.check_fixed()
    }

    /// What a place holds, which is no table, and no part of what every rank had.
    fn flat(&mut self, place: &Place) -> Stated<Rc<Flat>> {
        match self.memory.read(place)? {
            Content::Flat(flat) if flat.resharded => Err(refused(KEPT)),
            Content::Flat(flat) => Ok(flat),
            Content::Table(..) => Err(refused("a table is read as a tensor")),
        }
    }

    fn task(&mut self, task: &Task) -> Stated<()> {
        match &task.action {
            Action::Kernel { kernel, reads, writes } => {
                let read = reads.iter().map(|place| self.memory.read(place));
                let read = read.collect::<Stated<Vec<Content>>>()?;
                let plan = self.plan;
                let results = self.kernel(&plan.kernels[*kernel].body, read)?;
                if results.len() != writes.len() {
                    return Err(refused("a kernel has other results"));
                }
                for (place, flat) in writes.iter().zip(results) {
                    self.memory.write(place, &flat)?;
                }
                Ok(())
            }
            Action::Copy { from, to } => self.memory.copy(from, to),
            Action::Zero { places } => {
                for place in places {
                    let range = (place.offset, place.ty.bytes());
                    self.memory.put(place.buffer, range, memory::Held::Zero, 0);
                }
                Ok(())
            }
            Action::AllGather { group, ranks, send, recv } => {
                let Content::Flat(flat) = self.memory.read(send)? else {
                    return Err(refused("a table is gathered"));
                };
                let g = &self.plan.groups[*group];
                let is_part = flat.shards == ranks.unwrap_or(g.shards());
                if !is_part || flat.numel != g.numel || flat.resharded != ranks.is_some() {
                    return Err(refused("other parts are gathered than ranks have"));
                }
                let op = Op::AllGather(AllGather { unit: g.unit });
                let whole = Flat { shards: 1, resharded: false, ..self.each(&flat, &op)? };
                self.memory.write(recv, &Rc::new(whole))
            }
            Action::Reshard { group, ranks, from, to } => {
                let flat = self.flat(from)?;
                if flat.shards != 1 || flat.numel != self.plan.groups[*group].numel {
                    return Err(refused("a part is kept of what is no whole"));
                }
                let part = Flat { shards: *ranks, resharded: true, ..Flat::clone(&flat) };
                self.memory.write(to, &Rc::new(part))
            }
            Action::ReduceScatter { group, reduce, send, recv } => {
                let flat = self.flat(send)?;
                let g = &self.plan.groups[*group];
                if flat.shards != 1 || flat.numel != g.numel {
                    return Err(refused("a part is reduced as a whole"));
                }
                let op = ReduceScatter { reduce: *reduce, unit: g.unit, dtype: None };
                let flat = self.joined(&flat, *group)?;
                let reduced = self.each(&flat, &Op::ReduceScatter(op))?;
                self.memory.write(recv, &Rc::new(Flat { shards: g.shards(), ..reduced }))
            }
            Action::AllReduce { group, reduce, send, recv } => {
                let mut flat = self.flat(send)?;
                let (unit, shards) = match group {
                    Some(id) => {
                        let group = &self.plan.groups[*id];
                        flat = self.joined(&flat, *id)?;
                        (Some(group.unit), group.shards())
                    }
                    None => (None, 1),
                };
                if flat.shards != shards {
                    return Err(refused("parts of ranks with other parts are added"));
                }
                // The team of a group that is not sharded is all ranks.
                let unit = unit.filter(|_| shards == self.shards() || self.shards() == 1);
                let op = AllReduce { reduce: *reduce, unit, dtype: None };
                let reduced = self.each(&flat, &Op::AllReduce(op))?;
                self.memory.write(recv, &Rc::new(reduced))
            }
        }
    }

    /// Ranks that share one copy of the sharded state.
    fn shards(&self) -> usize {
        self.plan.groups.iter().map(|group| group.shards()).max().unwrap_or(1)
    }

    /// A collective of every piece. The sum, mean or largest of zeros is zero.
    fn each(&mut self, flat: &Flat, op: &Op) -> Stated<Flat> {
        let mut pieces = vec![];
        for piece in &flat.pieces {
            let mut piece = *piece;
            if let What::Of(..) = piece.what {
                let shape = self.shape_of(&[piece], piece.numel);
                let value = self.piece(piece, flat.dtype, &shape)?;
                piece.what = What::Of(self.add(op.clone(), &[value])?[0], 0);
            }
            pieces.push(piece);
        }
        Ok(Flat { pieces, ..Flat::clone(flat) })
    }
}
