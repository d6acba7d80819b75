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
use frit_ir::ops::{AllGather, AllReduce, ReduceScatter, StateName};
use frit_ir::plan::{Action, BufferId, Group, GroupId, PhaseName, Place, Plan, Task};
use frit_ir::{Graph, Op, Origin, Region, Shape, Tensor, ValueId};
use memory::{Content, Memory};
use std::collections::HashMap;
use std::rc::Rc;

/// What is said of a plan, or why nothing is.
type Stated<T> = Result<T, Unstated>;

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
    /// Where the task stands that is executed.
    region: Region,
    origin: Origin,
    /// The leaves of parameters and state, and where they are.
    leaves: Vec<Leaf>,
    /// Buffers that are fed before every micro-step.
    fed: Vec<BufferId>,
    /// The gradients of each group, when they are reduced.
    gradients: HashMap<GroupId, Rc<Flat>>,
    /// What the state within a step becomes by a micro-step, by buffer.
    within: HashMap<BufferId, Rc<Flat>>,
    /// See [`leaves::rows`].
    rows: HashMap<Joined, usize>,
    /// The region of the task.
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
    /// The elements of all ranks there that are its own.
    begin: usize,
    /// The state that it is, if it is not a parameter.
    state: Option<StateName>,
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
                let within =
                    |leaf: &&Leaf| leaf.state.as_ref().is_some_and(|s| !s.is_per_element());
                let within = self.leaves.iter().filter(within).map(|leaf| leaf.place.buffer);
                let changing: Vec<BufferId> = within.chain(self.fed.iter().copied()).collect();
                self.memory.begin_repeated(&changing)?;
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
                self.keep_within()?;
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

    /// What a place holds, which is no table.
    fn flat(&mut self, place: &Place) -> Stated<Rc<Flat>> {
        match self.memory.read(place)? {
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
                let flat = self.flat(send)?;
                let g = &self.plan.groups[*group];
                if flat.shards != ranks.unwrap_or(g.shards()) || flat.numel != g.numel {
                    return Err(refused("other parts are gathered than ranks have"));
                }
                let op = Op::AllGather(AllGather { unit: g.unit });
                let whole = Flat { shards: 1, ..self.each(&flat, &op)? };
                self.memory.write(recv, &Rc::new(whole))
            }
            Action::Reshard { group, ranks, from, to } => {
                let flat = self.flat(from)?;
                if flat.shards != 1 || flat.numel != self.plan.groups[*group].numel {
                    return Err(refused("a part is kept of what is no whole"));
                }
                self.memory.write(to, &Rc::new(Flat { shards: *ranks, ..Flat::clone(&flat) }))
            }
            Action::ReduceScatter { group, reduce, send, recv } => {
                let flat = self.flat(send)?;
                let g = &self.plan.groups[*group];
                if flat.shards != 1 || flat.numel != g.numel {
                    return Err(refused("a part is reduced as a whole"));
                }
                let op = ReduceScatter { reduce: *reduce, unit: g.unit, dtype: None };
                let reduced = self.each(&flat, &Op::ReduceScatter(op))?;
                self.memory.write(recv, &Rc::new(Flat { shards: g.shards(), ..reduced }))
            }
            Action::AllReduce { group, reduce, send, recv } => {
                let flat = self.flat(send)?;
                let (unit, shards) = match group {
                    Some(group) => {
                        let group = &self.plan.groups[*group];
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
