//! Executes a plan on several ranks in any order that its streams and waits allow, byte by byte, including invalid
//! plans. Kernels run in the IR interpreter.

use frit_ir::interpret;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::{Action, Arena, BufferId, PhaseId, PhaseName, Place, Plan, Stream, TaskId};
use frit_ir::{DType, Tensor};
use frit_runtime::converted;
use std::collections::HashMap;

/// What goes wrong when a plan is executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Bytes are read that were not written in this step.
    Undefined(TaskId),
    /// A place lies outside its arena.
    OutOfRange(TaskId),
    /// No task can go on.
    Deadlock,
    /// A kernel refuses its operands.
    Kernel(TaskId),
}

/// A sequence of numbers that is the same at every run.
pub(crate) struct Random(fastrand::Rng);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(fastrand::Rng::with_seed(seed))
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0.usize(..n.max(1))
    }
}

struct Rank {
    /// Bytes, and whether they are defined, by arena.
    arenas: [(Vec<u8>, Vec<bool>); 3],
    /// Phase executions that are complete.
    at: usize,
    /// Which tasks of the current phase are complete.
    done: Vec<bool>,
}

/// Ranks that execute one plan.
pub(crate) struct Machine<'a> {
    plan: &'a Plan,
    constants: &'a [(String, Tensor)],
    ranks: Vec<Rank>,
}

fn arena(arena: Arena) -> usize {
    match arena {
        Arena::Persistent => 0,
        Arena::Workspace => 1,
        Arena::Host => 2,
    }
}

/// A number that depends on all of these only.
fn value(name: &str, index: usize, salt: usize) -> f32 {
    let mut hash = salt as u64;
    for byte in name.bytes().map(u64::from).chain([index as u64]) {
        hash = (hash ^ byte).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(17);
    }
    (hash % 2003) as f32 / 1001.5 - 1.0
}

impl<'a> Machine<'a> {
    pub(crate) fn new(plan: &'a Plan, constants: &'a [(String, Tensor)]) -> Self {
        let arena = |bytes: usize, defined| (vec![0; bytes], vec![defined; bytes]);
        let rank = |_| Rank {
            arenas: [
                arena(plan.persistent_bytes, true),
                arena(plan.workspace_bytes, false),
                arena(plan.host_bytes, true),
            ],
            at: 0,
            done: vec![],
        };
        let ranks = (0..plan.world_size).map(rank).collect();
        let mut machine = Machine { plan, constants, ranks };
        (0..plan.world_size).for_each(|rank| machine.initialize(rank));
        machine
    }

    /// The phases of so many steps, micro-steps repeated, with their step and micro-step.
    fn program(&self, steps: usize) -> Vec<(PhaseId, usize, usize)> {
        let mut program = Vec::new();
        for step in 0..steps {
            for (p, phase) in self.plan.phases.iter_enumerated() {
                let n = if phase.name == PhaseName::MicroStep { self.plan.accumulation } else { 1 };
                program.extend((0..n).map(|micro| (p, step, micro)));
            }
        }
        program
    }

    fn initialize(&mut self, rank: usize) {
        let plan = self.plan;
        for group in &plan.groups {
            for segment in &group.segments {
                let Some((from, to, len)) = group.owned(segment, rank) else { continue };
                let name = &plan.params[segment.param].name;
                let values: Vec<u8> =
                    (from..from + len).flat_map(|i| value(name, i, 1).to_le_bytes()).collect();
                let copies = group.copies.iter().map(|c| (c.buffer, c.dtype));
                for (buffer, dtype) in copies.chain([(group.master, group.dtype)]) {
                    let values = converted(&values, DType::F32, dtype).expect("a held dtype");
                    self.put(rank, buffer, to * dtype.size(), &values);
                }
            }
            let groups = group
                .param_group_offsets
                .map(|buffer| (buffer, group.param_group_offsets_of(rank)));
            let params = group.param_offsets.map(|buffer| (buffer, group.param_offsets_of(rank)));
            for (buffer, table) in groups.into_iter().chain(params) {
                let table: Vec<u8> = table.iter().flat_map(|x| x.to_le_bytes()).collect();
                self.put(rank, buffer, 0, &table);
            }
        }
        for state in &plan.states {
            let first = Tensor::splat(state.ty.clone(), state.init).to_bytes();
            self.put(rank, state.buffer, 0, &first);
        }
        for hyper in &plan.hyper {
            self.put(rank, hyper.buffer, 0, &(hyper.value as f32).to_le_bytes());
        }
        for constant in &plan.constants {
            let found = self.constants.iter().find(|(name, _)| *name == constant.name);
            let bytes = found.expect("a constant's value").1.to_bytes();
            self.put(rank, constant.buffer, 0, &bytes);
        }
    }

    fn feed(&mut self, rank: usize, step: usize, micro: usize) {
        let plan = self.plan;
        for input in &plan.inputs {
            let salt = 2 + (step * 31 + micro) * 31 + rank;
            let n = input.ty.shape.numel();
            let bytes: Vec<u8> = match input.ty.dtype {
                DType::I64 => (0..n)
                    .flat_map(|i| ((value(&input.name, i, salt) > 0.0) as i64).to_le_bytes())
                    .collect(),
                _ => (0..n).flat_map(|i| value(&input.name, i, salt).to_le_bytes()).collect(),
            };
            self.put(rank, input.buffer, 0, &bytes);
        }
    }

    fn put(&mut self, rank: usize, buffer: BufferId, offset: usize, bytes: &[u8]) {
        let buffer = &self.plan.buffers[buffer];
        let at = buffer.offset + offset;
        let (memory, defined) = &mut self.ranks[rank].arenas[arena(buffer.arena)];
        memory[at..at + bytes.len()].copy_from_slice(bytes);
        defined[at..at + bytes.len()].fill(true);
    }

    /// Runs so many steps, choosing at random among the tasks that can run.
    pub(crate) fn run(&mut self, steps: usize, seed: u64) -> Result<(), Fault> {
        let program = self.program(steps);
        let mut random = Random::new(seed);
        for rank in 0..self.ranks.len() {
            self.enter(rank, &program);
        }
        loop {
            let mut ready = Vec::new();
            for rank in 0..self.ranks.len() {
                for stream in Stream::ALL {
                    ready.extend(self.next(rank, stream, &program).map(|task| (rank, task)));
                }
            }
            ready.retain(|(rank, task)| self.team_is_ready(*rank, *task, &program));
            if ready.is_empty() {
                let ended = self.ranks.iter().all(|r| r.at == program.len());
                return if ended { Ok(()) } else { Err(Fault::Deadlock) };
            }
            let (rank, task) = ready[random.below(ready.len())];
            let team = self.team(rank, task);
            if self.plan.tasks[task].action.is_collective() {
                self.collective(task, &team)?;
            } else {
                self.local(rank, task)?;
            }
            for rank in team {
                let begin = self.plan.phases[program[self.ranks[rank].at].0].begin;
                self.ranks[rank].done[task.0 - begin.0] = true;
                if self.ranks[rank].done.iter().all(|d| *d) {
                    self.ranks[rank].at += 1;
                    self.enter(rank, &program);
                }
            }
        }
    }

    /// Prepares the next phase; phases without tasks are passed over.
    fn enter(&mut self, rank: usize, program: &[(PhaseId, usize, usize)]) {
        while let Some(&(phase, step, micro)) = program.get(self.ranks[rank].at) {
            let p = &self.plan.phases[phase];
            if phase == PhaseId(0) && micro == 0 {
                self.ranks[rank].arenas[1].1.fill(false);
            }
            if p.name == PhaseName::MicroStep {
                self.feed(rank, step, micro);
            }
            self.ranks[rank].done = vec![false; p.tasks().len()];
            if p.begin < p.end {
                return;
            }
            self.ranks[rank].at += 1;
        }
    }

    /// The task of a stream that is next, if what it waits for is complete.
    fn next(
        &self,
        rank: usize,
        stream: Stream,
        program: &[(PhaseId, usize, usize)],
    ) -> Option<TaskId> {
        let state = &self.ranks[rank];
        let phase = &self.plan.phases[program.get(state.at)?.0];
        let task = phase
            .tasks()
            .find(|i| self.plan.tasks[*i].stream == stream && !state.done[i.0 - phase.begin.0])?;
        let waits = &self.plan.tasks[task].waits;
        waits.iter().all(|w| state.done[w.0 - phase.begin.0]).then_some(task)
    }

    fn team(&self, rank: usize, task: TaskId) -> Vec<usize> {
        let team = self.plan.team(&self.plan.tasks[task].action, rank);
        team.map_or(vec![rank], |team| team.ranks().collect())
    }

    fn team_is_ready(
        &self,
        rank: usize,
        task: TaskId,
        program: &[(PhaseId, usize, usize)],
    ) -> bool {
        let stream = self.plan.tasks[task].stream;
        self.team(rank, task).into_iter().all(|other| {
            self.ranks[other].at == self.ranks[rank].at
                && self.next(other, stream, program) == Some(task)
        })
    }

    fn read(&self, rank: usize, task: TaskId, place: &Place) -> Result<Vec<u8>, Fault> {
        let buffer = &self.plan.buffers[place.buffer];
        let (memory, defined) = &self.ranks[rank].arenas[arena(buffer.arena)];
        let range = buffer.offset + place.offset..buffer.offset + place.offset + place.ty.bytes();
        let bytes = memory.get(range.clone()).ok_or(Fault::OutOfRange(task))?;
        let defined = defined[range].iter().all(|d| *d);
        if defined { Ok(bytes.to_vec()) } else { Err(Fault::Undefined(task)) }
    }

    fn write(
        &mut self,
        rank: usize,
        task: TaskId,
        place: &Place,
        bytes: &[u8],
    ) -> Result<(), Fault> {
        let buffer = &self.plan.buffers[place.buffer];
        let at = buffer.offset + place.offset;
        let (memory, defined) = &mut self.ranks[rank].arenas[arena(buffer.arena)];
        let target = memory.get_mut(at..at + bytes.len()).ok_or(Fault::OutOfRange(task))?;
        target.copy_from_slice(bytes);
        defined[at..at + bytes.len()].fill(true);
        Ok(())
    }

    fn local(&mut self, rank: usize, task: TaskId) -> Result<(), Fault> {
        let plan = self.plan;
        match &plan.tasks[task].action {
            Action::Kernel { kernel, reads, writes } => {
                let mut feeds = HashMap::new();
                for (i, place) in reads.iter().enumerate() {
                    let bytes = self.read(rank, task, place)?;
                    let tensor = Tensor::from_bytes(place.ty.clone(), &bytes);
                    feeds.insert(i.to_string(), tensor.map_err(|_| Fault::Kernel(task))?);
                }
                let body = &plan.kernels[*kernel].body;
                let results = interpret::run(body, &feeds, interpret::Options::default());
                let results = results.map_err(|_| Fault::Kernel(task))?;
                for ((_, tensor), place) in results.into_iter().zip(writes) {
                    self.write(rank, task, place, &tensor.to_bytes())?;
                }
                Ok(())
            }
            action @ Action::Reshard { to, .. } => {
                let from = action.kept_by(rank).expect("a part is kept");
                let bytes = self.read(rank, task, &from)?;
                self.write(rank, task, to, &bytes)
            }
            Action::Copy { from, to } => {
                let bytes = self.read(rank, task, from)?;
                self.write(rank, task, to, &bytes)
            }
            Action::Zero { places } => {
                places.iter().try_for_each(|p| self.write(rank, task, p, &vec![0; p.ty.bytes()]))
            }
            _ => Ok(()),
        }
    }

    fn collective(&mut self, task: TaskId, team: &[usize]) -> Result<(), Fault> {
        let plan = self.plan;
        let action = &plan.tasks[task].action;
        let (send, recv) = (action.reads()[0], action.writes()[0]);
        let sent: Vec<Vec<u8>> =
            team.iter().map(|rank| self.read(*rank, task, send)).collect::<Result<_, _>>()?;
        let reduce = match action {
            Action::ReduceScatter { reduce, .. } | Action::AllReduce { reduce, .. } => *reduce,
            _ => {
                let all = sent.concat();
                return team.iter().try_for_each(|rank| self.write(*rank, task, recv, &all));
            }
        };
        let floats = |bytes: &Vec<u8>| -> Vec<f32> {
            bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        };
        let mut sum = floats(&sent[0]);
        for part in &sent[1..] {
            let both = sum.iter_mut().zip(floats(part));
            match reduce {
                ReduceKind::Max => both.for_each(|(s, x)| *s = s.max(x)),
                _ => both.for_each(|(s, x)| *s += x),
            }
        }
        if reduce == ReduceKind::Mean {
            sum.iter_mut().for_each(|s| *s /= team.len() as f32);
        }
        let bytes: Vec<u8> = sum.iter().flat_map(|x| x.to_le_bytes()).collect();
        let part = recv.ty.bytes();
        for (i, rank) in team.iter().enumerate() {
            let own = match action {
                Action::ReduceScatter { .. } => bytes.get(i * part..(i + 1) * part),
                _ => Some(&bytes[..]),
            };
            self.write(*rank, task, recv, own.ok_or(Fault::OutOfRange(task))?)?;
        }
        Ok(())
    }

    /// The bytes of a buffer of a rank.
    pub(crate) fn contents(&self, rank: usize, buffer: BufferId) -> Vec<u8> {
        let buffer = &self.plan.buffers[buffer];
        let (memory, _) = &self.ranks[rank].arenas[arena(buffer.arena)];
        memory[buffer.offset..buffer.offset + buffer.bytes].to_vec()
    }

    /// Parameters, their state, scalar state and metrics of every rank, as `plan` names them.
    pub(crate) fn outcome(&self, plan: &Plan) -> Vec<u8> {
        let mut all = Vec::new();
        for (rank, state) in self.ranks.iter().enumerate() {
            let mut take = |buffer: BufferId, offset: usize, bytes: usize| {
                let buffer = &self.plan.buffers[buffer];
                let (memory, _) = &state.arenas[arena(buffer.arena)];
                all.extend_from_slice(
                    &memory[buffer.offset + offset..buffer.offset + offset + bytes],
                );
            };
            for group in &plan.groups {
                let states = group.states.iter().filter(|s| !s.name.is_sum());
                let states = states.map(|s| (s.buffer, 4));
                for (buffer, size) in
                    std::iter::once((group.master, group.dtype.size())).chain(states)
                {
                    for segment in &group.segments {
                        let Some((_, at, len)) = group.owned(segment, rank) else { continue };
                        take(buffer, at * size, len * size);
                    }
                }
            }
            plan.states.iter().for_each(|s| take(s.buffer, 0, s.ty.bytes()));
            let metrics = plan.metrics.iter().map(|m| &m.place);
            metrics.for_each(|p| take(p.buffer, p.offset, p.ty.bytes()));
        }
        all
    }
}
