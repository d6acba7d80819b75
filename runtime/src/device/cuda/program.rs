//! Compiles a plan's tasks to commands with all addresses resolved.

use super::command::{Command, settle};
use super::memory::Memory;
use super::modules::Modules;
use super::operands::Operands;
use super::random_data::{Region, Values};
use super::sums;
use super::survey::{Code, Survey};
use super::tuning::Settled;
use crate::RunError;
use frit_cuda::CudaError;
use frit_cuda::GemmProblem;
use frit_cuda::driver::{
    Address, Arguments, Collective, Driver, Exchange, GemmAddresses, Shape, TeamHandle,
};
use frit_ir::DType;
use frit_ir::plan::{
    ALIGNMENT, Action, Argument, Candidate, CandidateName, CudaLaunch, Epilogue, GEMM_WORKSPACE,
    Gemm, GeneratedLaunch, KernelId, Launch, Operation, OperationLaunch, Place, Plan, Pointer,
    RankSum, SourceKernel, Stream, TaskId, Team, TiVec, layout,
};
use std::collections::HashMap;

/// Blocks of a grid-stride loop per resident block. Blocks of concurrent collectives and kernels displace some of them:
/// with several rounds the others take over their work, and a collective can start when the first round ends rather
/// than the kernel.
const ROUNDS: u32 = 4;
/// The alignment of parameters and gradients however groups are laid out, in bytes.
const EVERYWHERE: usize = 16;

/// The commands of every task.
pub(super) struct Program {
    /// By task.
    pub(super) commands: TiVec<TaskId, Vec<Command>>,
    /// The GEMMs, each once.
    pub(super) problems: Vec<GemmOf>,
    /// The choices, each once; one that is part of another comes before it.
    pub(super) choices: Vec<ChoiceOf>,
}

/// A GEMM with the addresses of the first task that uses it.
pub(super) struct GemmOf {
    pub(super) problem: GemmProblem,
    pub(super) at: GemmAddresses,
    /// What it reads.
    pub(super) regions: Vec<Region>,
}

/// Several ways to compute the same, as the first task that wants it does.
pub(super) struct ChoiceOf {
    /// What it is known by.
    pub(super) key: String,
    /// The implementations and their commands, none of which computes nothing.
    pub(super) candidates: Vec<(CandidateName, Vec<Command>)>,
    /// What cuDNN computes of them.
    operations: Vec<OperationOf>,
    /// What they read.
    pub(super) regions: Vec<Region>,
}

/// An operation of a candidate.
pub(super) struct OperationOf {
    candidate: usize,
    /// Its number among all operations.
    pub(super) number: usize,
    pub(super) operation: Operation,
    /// Workspace that its engine may use, in bytes.
    pub(super) workspace_bytes: usize,
}

/// Inputs for binding the launches of kernels.
struct Binder<'a, D> {
    driver: &'a D,
    modules: &'a Modules,
    code: &'a TiVec<KernelId, Code<'a>>,
    problems: Vec<GemmOf>,
    by_problem: HashMap<GemmProblem, usize>,
    choices: Vec<ChoiceOf>,
    by_key: HashMap<String, usize>,
    n_operations: usize,
    /// The alignment of operands that GEMMs count on at most, in bytes.
    alignment: usize,
}

/// Inputs for binding copies, zeros and collectives.
struct Transfers<'a, D> {
    plan: &'a Plan,
    driver: &'a D,
    memory: &'a Memory,
    modules: &'a Modules,
    rank: usize,
    teams: Vec<(Team, TeamHandle)>,
}

impl Program {
    /// Binds every task to the plan's memory.
    ///
    /// # Errors
    /// A kernel that is not in its module.
    pub(super) fn bind<D: Driver>(
        plan: &Plan,
        survey: &Survey,
        driver: &D,
        memory: &Memory,
        modules: &Modules,
        rank: usize,
    ) -> Result<Program, RunError> {
        let mut binder = Binder::new(plan, driver, modules, &survey.code);
        let mut transfers = Transfers { plan, driver, memory, modules, rank, teams: Vec::new() };
        let mut commands = TiVec::with_capacity(plan.tasks.len());
        for (i, task) in plan.tasks.iter_enumerated() {
            commands.push(match &task.action {
                Action::Kernel { kernel, reads, writes } => {
                    let fault = survey.faulting.binary_search(&i).unwrap_or_default();
                    let operands = Operands::of(plan, memory, (reads, writes), task.stream, fault);
                    binder.kernel(&survey.code[*kernel], &operands)?
                }
                other => transfers.bind(other, task.stream)?,
            });
        }
        Ok(binder.program(commands))
    }

    /// Binds the tasks that leave a choice, each apart from the plan's memory, from `base` on: no two may run at once.
    /// Engines may use no more than `engine_bytes` of workspace. Returns where the last byte of all ends, too.
    ///
    /// # Errors
    /// As [`Program::bind`].
    pub(super) fn of_choices<D: Driver>(
        plan: &Plan,
        survey: &Survey,
        driver: &D,
        modules: &Modules,
        engine_bytes: usize,
        base: Address,
    ) -> Result<(Program, Address), RunError> {
        let mut binder = Binder::new(plan, driver, modules, &survey.code);
        let (mut commands, mut last) = (TiVec::with_capacity(plan.tasks.len()), base);
        for task in &plan.tasks {
            commands.push(match &task.action {
                Action::Kernel { kernel, reads, writes } => match &survey.code[*kernel] {
                    Code::Launches(selected) if selected.leaves_a_choice() => {
                        let places = (&reads[..], &writes[..]);
                        let (operands, end) =
                            Operands::apart(plan, selected, places, engine_bytes, base);
                        last = last.max(end);
                        binder.launches(&selected.launches, &operands)?
                    }
                    _ => vec![],
                },
                _ => vec![],
            });
        }
        Ok((binder.program(commands), last))
    }

    /// The number of GEMMs and choices.
    pub(super) fn n_chosen(&self) -> usize {
        self.problems.len() + self.choices.len()
    }

    /// The number of operations of all choices.
    pub(super) fn n_operations(&self) -> usize {
        self.choices.iter().map(|c| c.operations.len()).sum()
    }

    /// Replaces every choice by the candidate that was chosen.
    pub(super) fn settle(&mut self, chosen: &[Settled]) {
        self.commands.iter_mut().for_each(|commands| settle(commands, chosen));
    }
}

impl ChoiceOf {
    /// The operation that a candidate needs an engine for.
    pub(super) fn operation_of(&self, candidate: usize) -> Option<&OperationOf> {
        self.operations.iter().find(|o| o.candidate == candidate)
    }
}

impl<D: Driver> Transfers<'_, D> {
    fn at(&self, place: &Place) -> Address {
        self.memory.place(self.plan, place)
    }

    /// The commands of copies, zeros and collectives.
    fn bind(&mut self, action: &Action, stream: Stream) -> Result<Vec<Command>, CudaError> {
        if let Some(sum) = self.plan.rank_sum(action) {
            return self.sum(action, sum, stream);
        }
        let numel = |place: &Place| place.ty.shape.numel();
        let command = match action {
            Action::Kernel { .. } => unreachable!("invariant: kernels are bound elsewhere"),
            Action::AllGather { send, recv, .. } => {
                let team = self.team(action)?;
                self.collective(Exchange::AllGather, team, send, recv, numel(send))
            }
            Action::ReduceScatter { reduce, send, recv, .. } => {
                let team = self.team(action)?;
                self.collective(Exchange::ReduceScatter(*reduce), team, send, recv, numel(recv))
            }
            Action::AllReduce { reduce, send, recv, .. } => {
                let team = self.team(action)?;
                self.collective(Exchange::AllReduce(*reduce), team, send, recv, numel(send))
            }
            Action::Reshard { to, .. } => {
                let from = action.kept_by(self.rank).expect("invariant: a part is kept");
                Command::Copy { to: self.at(to), from: self.at(&from), bytes: to.ty.bytes() }
            }
            Action::Copy { from, to } if self.plan.host_copy(action).is_some() => {
                let on_host = |p: &Place| self.memory.on_host(self.plan, p.buffer, p.offset);
                let bytes = from.ty.bytes();
                match (on_host(from), on_host(to)) {
                    (Some(from), _) => Command::CopyIn { to: self.at(to), from, bytes },
                    (_, Some(to)) => Command::CopyOut { to, from: self.at(from), bytes },
                    (None, None) => unreachable!("invariant: one of the two is on the host"),
                }
            }
            Action::Copy { from, to } => {
                Command::Copy { to: self.at(to), from: self.at(from), bytes: from.ty.bytes() }
            }
            Action::Zero { places } => {
                let zero = |p| Command::Zero { at: self.at(p), bytes: p.ty.bytes() };
                return Ok(places.iter().map(zero).filter(Command::does_something).collect());
            }
        };
        Ok(Some(command).into_iter().filter(Command::does_something).collect())
    }

    /// The commands of a sum over ranks, with its rows in the stream's scratch memory.
    fn sum(
        &mut self,
        action: &Action,
        sum: RankSum,
        stream: Stream,
    ) -> Result<Vec<Command>, CudaError> {
        let (send, recv, is_whole) = match action {
            Action::ReduceScatter { send, recv, .. } => (send, recv, false),
            Action::AllReduce { send, recv, .. } => (send, recv, true),
            _ => unreachable!("invariant: a sum"),
        };
        let at = sums::Addresses {
            send: self.at(send),
            recv: self.at(recv),
            rows: self.memory.scratch[stream.index()],
        };
        let handle = self.team(action)?;
        let team =
            self.plan.team(action, self.rank).expect("invariant: every collective has a team");
        let own = (self.rank - team.first) / team.stride;
        let mut commands =
            sums::commands(self.driver, self.modules, sum, (handle, own), at, is_whole)?;
        commands.retain(Command::does_something);
        Ok(commands)
    }

    fn collective(
        &self,
        exchange: Exchange,
        team: TeamHandle,
        send: &Place,
        recv: &Place,
        count: usize,
    ) -> Command {
        let (dtype, send, recv) = (send.ty.dtype, self.at(send), self.at(recv));
        Command::Collective(Collective { exchange, team, send, recv, count, dtype })
    }

    /// The team of a collective, created at its first use, which is in plan order on every rank.
    fn team(&mut self, action: &Action) -> Result<TeamHandle, CudaError> {
        let team = self.plan.team(action, self.rank);
        let team = team.expect("invariant: every collective has a team");
        if team.count == self.plan.world_size {
            return Ok(TeamHandle::default());
        }
        if let Some((_, handle)) = self.teams.iter().find(|(known, _)| *known == team) {
            return Ok(*handle);
        }
        let handle = self.driver.create_team(team)?;
        self.teams.push((team, handle));
        Ok(handle)
    }
}

impl<'a, D: Driver> Binder<'a, D> {
    fn new(
        plan: &Plan,
        driver: &'a D,
        modules: &'a Modules,
        code: &'a TiVec<KernelId, Code<'a>>,
    ) -> Binder<'a, D> {
        Binder {
            driver,
            modules,
            code,
            problems: Vec::new(),
            by_problem: HashMap::new(),
            choices: Vec::new(),
            by_key: HashMap::new(),
            n_operations: 0,
            // Where a parameter lies in a group may depend on the ranks, and on it what the library offers.
            alignment: if plan.reproducible.is_some() { EVERYWHERE } else { ALIGNMENT },
        }
    }

    fn program(self, commands: TiVec<TaskId, Vec<Command>>) -> Program {
        Program { commands, problems: self.problems, choices: self.choices }
    }

    fn kernel(&mut self, code: &Code, operands: &Operands) -> Result<Vec<Command>, RunError> {
        match code {
            Code::Generated { .. } => {
                let at = [&operands.reads[..], &operands.writes].concat();
                self.generated(code, at, Some(operands.scratch))
            }
            Code::Launches(selected) => self.launches(&selected.launches, operands),
        }
    }

    /// The launches of generated code on what it reads and writes.
    fn generated(
        &self,
        code: &Code,
        operands: Vec<Address>,
        scratch: Option<Address>,
    ) -> Result<Vec<Command>, RunError> {
        let Code::Generated { launches, scratch_bytes } = code else {
            return Err(refused("a launch of a kernel that is not generated"));
        };
        let mut arguments = Arguments::default();
        operands.into_iter().for_each(|at| arguments.push(at));
        if *scratch_bytes > 0 {
            arguments.push(scratch.ok_or_else(|| refused("a kernel without its scratch memory"))?);
        }
        let mut commands = Vec::with_capacity(launches.len());
        for launch in *launches {
            let mut grid = [launch.grid[0], launch.grid[1], 1];
            let function = self.modules.generated(self.driver, launch)?;
            if launch.grid_stride {
                let most = self.modules.resident_blocks(self.driver, function, launch.block)?;
                grid[0] = grid[0].min(most.saturating_mul(ROUNDS));
            }
            let CudaLaunch { block, shared_bytes, .. } = *launch;
            let shape = Shape { grid, block, shared_bytes };
            let arguments = arguments.clone();
            commands.push(Command::Launch { function, shape, arguments });
        }
        commands.retain(Command::does_something);
        Ok(commands)
    }

    /// The commands of launches, except those that do nothing.
    fn launches(
        &mut self,
        launches: &[Launch],
        operands: &Operands,
    ) -> Result<Vec<Command>, RunError> {
        let mut commands = Vec::with_capacity(launches.len());
        for launch in launches {
            commands.extend(self.launch(launch, operands)?);
        }
        commands.retain(Command::does_something);
        Ok(commands)
    }

    fn launch(&mut self, launch: &Launch, operands: &Operands) -> Result<Vec<Command>, RunError> {
        Ok(vec![match launch {
            Launch::Copy { from, to, bytes } => {
                let (to, from) = (operands.pointer(*to), operands.pointer(*from));
                // What a result adds to may be in its place.
                Command::Copy { to, from, bytes: if to == from { 0 } else { *bytes } }
            }
            Launch::Zero { at, bytes } => {
                Command::Zero { at: operands.pointer(*at), bytes: *bytes }
            }
            Launch::Source(kernel) => self.source(kernel, operands)?,
            Launch::Gemm(gemm) => {
                let at = addresses(gemm, operands);
                if gemm.k == 0 || gemm.m * gemm.n * gemm.batch == 0 {
                    return Ok(vec![empty_gemm(gemm, at.d)?]);
                }
                Command::Multiply { problem: self.problem(gemm, at, operands), at }
            }
            Launch::Generated(GeneratedLaunch { kernel, reads, writes, scratch }) => {
                let at = reads.iter().chain(writes).map(|p| operands.pointer(*p)).collect();
                let scratch = scratch.map(|p| operands.pointer(p));
                return self.generated(&self.code[*kernel], at, scratch);
            }
            Launch::Operation(_) => return Err(refused("an operation of cuDNN has no fallback")),
            Launch::Choice(candidates) => self.choice(candidates, operands)?,
        }])
    }

    fn choice(
        &mut self,
        candidates: &[Candidate],
        operands: &Operands,
    ) -> Result<Command, RunError> {
        let (mut bound, mut operations) = (Vec::with_capacity(candidates.len()), Vec::new());
        let mut regions = operands.regions.clone();
        for (candidate, Candidate { name, launches, .. }) in candidates.iter().enumerate() {
            let mut commands = Vec::with_capacity(launches.len());
            for launch in launches {
                let Launch::Operation(OperationLaunch { operation, at }) = launch else {
                    regions.extend(scratch_of(launch, operands));
                    commands.extend(self.launch(launch, operands)?);
                    continue;
                };
                let at: Vec<Address> = at.iter().map(|p| operands.pointer(*p)).collect();
                let (workspace, bytes) = operands.workspace;
                let number = operations.len();
                let workspace_bytes = operation.workspace_bytes().min(bytes);
                let operation = operation.at(&at);
                operations.push(OperationOf { candidate, number, operation, workspace_bytes });
                commands.push(Command::Execute { operation: number, at, workspace });
            }
            commands.retain(Command::does_something);
            bound.push((*name, commands));
        }
        let key = self.key(&bound, &operations);
        let next = self.choices.len();
        let choice = *self.by_key.entry(key.clone()).or_insert(next);
        if choice == next {
            for (i, o) in operations.iter_mut().enumerate() {
                o.number = self.n_operations + i;
            }
            self.n_operations += operations.len();
        } else {
            for (o, known) in operations.iter_mut().zip(&self.choices[choice].operations) {
                o.number = known.number;
            }
        }
        let executed = bound.iter_mut().flat_map(|(_, commands)| commands);
        let executed = executed.filter_map(|c| match c {
            Command::Execute { operation, .. } => Some(operation),
            _ => None,
        });
        executed.zip(&operations).for_each(|(number, o)| *number = o.number);
        let candidates = bound.iter().map(|(_, commands)| commands.clone()).collect();
        if choice == next {
            self.choices.push(ChoiceOf { key, candidates: bound, operations, regions });
        }
        Ok(Command::Choice { choice, candidates })
    }

    /// What a choice is known by: its candidates and what libraries compute in them.
    fn key(
        &self,
        candidates: &[(CandidateName, Vec<Command>)],
        operations: &[OperationOf],
    ) -> String {
        let names: Vec<&str> = candidates.iter().map(|(name, _)| name.word()).collect();
        // The last needs no library but for plain GEMMs.
        let others = &candidates[..candidates.len().saturating_sub(1)];
        let problems = others.iter().flat_map(|(_, c)| c).filter_map(Command::problem);
        let problems = problems.map(|p| self.problems[p].problem.to_string());
        let of: Vec<String> =
            operations.iter().map(|o| o.operation.to_string()).chain(problems).collect();
        format!("{}: {}", names.join(" or "), of.join(" + "))
    }

    /// The index of a GEMM, added if it is new.
    fn problem(&mut self, gemm: &Gemm, at: GemmAddresses, operands: &Operands) -> usize {
        let problem = GemmProblem::of(gemm, &at).aligned_to(self.alignment);
        let next = self.problems.len();
        let index = *self.by_problem.entry(problem.clone()).or_insert(next);
        if index == next {
            let mut regions = operands.regions.clone();
            regions.extend(scratch_of_gemm(gemm, operands));
            self.problems.push(GemmOf { problem, at, regions });
        }
        index
    }

    fn source(&mut self, kernel: &SourceKernel, operands: &Operands) -> Result<Command, RunError> {
        let function = self.modules.source(self.driver, kernel)?;
        let mut arguments = Arguments::default();
        for argument in &kernel.arguments {
            match argument {
                Argument::Pointer(p) => arguments.push(operands.pointer(*p)),
                Argument::I64(x) => arguments.push(x.cast_unsigned()),
                Argument::F32(x) => arguments.push(u64::from(x.to_bits())),
                Argument::F64(x) => arguments.push(x.to_bits()),
                Argument::Words(words) => {
                    let words: Vec<u64> = words.iter().map(|w| w.cast_unsigned()).collect();
                    arguments.push_words(&words);
                }
                Argument::Pointers(pointers) => {
                    let words: Vec<u64> = pointers.iter().map(|p| operands.pointer(*p)).collect();
                    arguments.push_words(&words);
                }
            }
        }
        let SourceKernel { grid, block, shared_bytes, .. } = *kernel;
        Ok(Command::Launch { function, shape: Shape { grid, block, shared_bytes }, arguments })
    }
}

fn addresses(gemm: &Gemm, operands: &Operands) -> GemmAddresses {
    let at = |pointer: Option<Pointer>| pointer.map_or(0, |p| operands.pointer(p));
    let (vector, matrix) = match gemm.epilogue {
        Epilogue::None => (None, None),
        Epilogue::Add { matrix, bias } => (bias, Some(matrix)),
        Epilogue::Gelu { bias, before } => (bias, before),
        Epilogue::GeluGrad { before, rows } => (rows, Some(before)),
        Epilogue::Bias(v) | Epilogue::SumA(v) | Epilogue::SumB(v) => (Some(v), None),
    };
    let (workspace, bytes) = operands.workspace;
    GemmAddresses {
        a: at(Some(gemm.a.at)),
        b: at(Some(gemm.b.at)),
        d: at(Some(gemm.d.at)),
        scales: [at(gemm.a.scale), at(gemm.b.scale)],
        vector: at(vector),
        matrix: at(matrix),
        workspace: (workspace, bytes.min(GEMM_WORKSPACE)),
    }
}

/// What a launch reads of scratch memory, as far as its elements are known.
fn scratch_of(launch: &Launch, operands: &Operands) -> Vec<Region> {
    match launch {
        Launch::Gemm(gemm) => scratch_of_gemm(gemm, operands),
        _ => vec![],
    }
}

fn scratch_of_gemm(gemm: &Gemm, operands: &Operands) -> Vec<Region> {
    let mut regions = Vec::new();
    let mut add = |at: Pointer, bytes: usize, dtype: DType| {
        if let Pointer::Scratch(_) = at {
            let (at, values) = (operands.pointer(at), Values::floats(dtype));
            regions.push(Region { at, bytes, values });
        }
    };
    for (matrix, elements) in [(&gemm.a, gemm.m * gemm.k), (&gemm.b, gemm.k * gemm.n)] {
        let gaps = matrix.batch_stride * (gemm.batch - 1);
        add(matrix.at, (elements + gaps) * matrix.dtype.size(), matrix.dtype);
        if let Some(scale) = matrix.scale {
            add(scale, DType::F32.size(), DType::F32);
        }
    }
    regions
}

/// That the plan is not as a compiler writes it.
fn refused(reason: &str) -> RunError {
    RunError::Plan { path: layout::PLAN.into(), reason: reason.into() }
}

/// A GEMM with an extent of zero: nothing, or zeros.
fn empty_gemm(gemm: &Gemm, d: Address) -> Result<Command, RunError> {
    let numel = gemm.m * gemm.n * gemm.batch;
    let dense =
        gemm.d.row_stride == gemm.n && (gemm.batch == 1 || gemm.d.batch_stride == gemm.m * gemm.n);
    if numel > 0 && (!dense || gemm.epilogue != Epilogue::None) {
        let reason = "a GEMM over no elements with a bias or gaps has no CUDA kernel".into();
        return Err(RunError::Plan { path: layout::PLAN.into(), reason });
    }
    Ok(Command::Zero { at: d, bytes: numel * gemm.d.dtype.size() })
}
