//! Compiles a plan's tasks to commands with all addresses resolved.

use super::command::{Command, settle_operations, settle_products};
use super::memory::Memory;
use super::modules::Modules;
use super::operands::Operands;
use super::survey::{Code, Survey};
use crate::RunError;
use frit_cuda::CudaError;
use frit_cuda::Product;
use frit_cuda::driver::{
    Address, Arguments, Collective, Driver, Exchange, ProductAddresses, Shape, TeamHandle,
};
use frit_ir::plan::{
    Action, Argument, Candidate, Epilogue, GEMM_WORKSPACE, Gemm, Launch, Operation,
    OperationLaunch, Place, Plan, Pointer, SourceKernel, TaskId, Team, TiVec, layout,
};
use std::collections::HashMap;

/// Blocks of a grid-stride loop per resident block. Blocks of concurrent collectives and kernels displace some of them:
/// with several rounds the others take over their work, and a collective can start when the first round ends rather
/// than the kernel.
const ROUNDS: u32 = 4;

/// The commands of every task.
pub(super) struct Program {
    /// By task.
    pub(super) commands: TiVec<TaskId, Vec<Command>>,
    /// The GEMMs, each once, with the addresses of the first task that uses it.
    pub(super) products: Vec<(Product, ProductAddresses)>,
    /// The GEMMs whose epilogue has a fallback.
    pub(super) epilogues: Vec<EpilogueChoice>,
    /// The operations with cuDNN candidates, each once.
    pub(super) operations: Vec<OperationChoice>,
}

/// A GEMM with an epilogue, by its index, and its fallback.
#[derive(Clone, Debug)]
pub(super) struct EpilogueChoice {
    pub(super) product: usize,
    pub(super) fallback: Vec<Command>,
}

/// An operation with a cuDNN candidate, and the commands of its first task.
#[derive(Clone, Debug)]
pub(super) struct OperationChoice {
    pub(super) operation: Operation,
    /// The operation and the commands around it.
    pub(super) candidate: Vec<Command>,
    /// The equivalent commands without cuDNN.
    pub(super) fallback: Vec<Command>,
}

/// Inputs for binding the launches of kernels.
struct Binder<'a, D> {
    driver: &'a D,
    modules: &'a Modules,
    products: Vec<(Product, ProductAddresses)>,
    by_product: HashMap<Product, usize>,
    epilogues: Vec<EpilogueChoice>,
    operations: Vec<OperationChoice>,
    by_operation: HashMap<Operation, usize>,
}

/// Inputs for binding copies, zeros and collectives.
struct Transfers<'a, D> {
    plan: &'a Plan,
    driver: &'a D,
    memory: &'a Memory,
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
        let mut binder = Binder::new(driver, modules);
        let mut transfers = Transfers { plan, driver, memory, rank, teams: Vec::new() };
        let mut commands = TiVec::with_capacity(plan.tasks.len());
        for (i, task) in plan.tasks.iter_enumerated() {
            commands.push(match &task.action {
                Action::Kernel { kernel, reads, writes } => {
                    let fault = survey.faulting.binary_search(&i).unwrap_or_default();
                    let operands = Operands::of(plan, memory, (reads, writes), task.stream, fault);
                    binder.kernel(&survey.code[*kernel], &operands)?
                }
                other => transfers.bind(other)?,
            });
        }
        Ok(binder.program(commands))
    }

    /// Binds the tasks with choices to temporary memory from `base` on, which they share, so no two may run
    /// concurrently. Also returns the end address.
    ///
    /// # Errors
    /// As [`Program::bind`].
    pub(super) fn of_choices<D: Driver>(
        plan: &Plan,
        survey: &Survey,
        driver: &D,
        modules: &Modules,
        base: Address,
    ) -> Result<(Program, Address), RunError> {
        let mut binder = Binder::new(driver, modules);
        let (mut commands, mut last) = (TiVec::with_capacity(plan.tasks.len()), base);
        for task in &plan.tasks {
            commands.push(match &task.action {
                Action::Kernel { kernel, reads, writes } => match &survey.code[*kernel] {
                    Code::Launches(selected) if selected.leaves_a_choice() => {
                        let (places, engines) = ((&reads[..], &writes[..]), driver.has_engines());
                        let (operands, end) =
                            Operands::apart(plan, selected, places, engines, base);
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

    /// Decides which GEMMs keep their epilogue: those with a selected algorithm.
    pub(super) fn settle_products(&mut self, has_algorithm: impl Fn(usize) -> bool) {
        let choices = self.operations.iter_mut().flat_map(|o| [&mut o.candidate, &mut o.fallback]);
        let epilogues = self.epilogues.iter_mut().map(|e| &mut e.fallback);
        for commands in self.commands.iter_mut().chain(choices).chain(epilogues) {
            settle_products(commands, &has_algorithm);
        }
    }

    /// Decides which operations cuDNN computes: those with a selected engine.
    pub(super) fn settle_operations(&mut self, has_engine: impl Fn(usize) -> bool) {
        for commands in &mut self.commands {
            settle_operations(commands, &has_engine);
        }
    }
}

impl<D: Driver> Transfers<'_, D> {
    fn at(&self, place: &Place) -> Address {
        self.memory.place(self.plan, place)
    }

    /// The commands of copies, zeros and collectives.
    fn bind(&mut self, action: &Action) -> Result<Vec<Command>, CudaError> {
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
    fn new(driver: &'a D, modules: &'a Modules) -> Binder<'a, D> {
        Binder {
            driver,
            modules,
            products: Vec::new(),
            by_product: HashMap::new(),
            epilogues: Vec::new(),
            operations: Vec::new(),
            by_operation: HashMap::new(),
        }
    }

    fn program(self, commands: TiVec<TaskId, Vec<Command>>) -> Program {
        Program {
            commands,
            products: self.products,
            epilogues: self.epilogues,
            operations: self.operations,
        }
    }

    fn kernel(&mut self, code: &Code, operands: &Operands) -> Result<Vec<Command>, RunError> {
        let mut commands = Vec::new();
        match code {
            Code::Generated { launches, scratch_bytes } => {
                let mut arguments = Arguments::default();
                for at in operands.reads.iter().chain(&operands.writes) {
                    arguments.push(*at);
                }
                if *scratch_bytes > 0 {
                    arguments.push(operands.scratch);
                }
                for launch in *launches {
                    let mut grid = [launch.grid[0], launch.grid[1], 1];
                    let function = self.modules.generated(self.driver, &launch.symbol)?;
                    if launch.grid_stride {
                        let most =
                            self.modules.resident_blocks(self.driver, function, launch.block)?;
                        grid[0] = grid[0].min(most.saturating_mul(ROUNDS));
                    }
                    let shape = Shape { grid, block: launch.block, shared_bytes: 0 };
                    let arguments = arguments.clone();
                    commands.push(Command::Launch { function, shape, arguments });
                }
            }
            Code::Launches(selected) => {
                commands = self.launches(&selected.launches, operands)?;
            }
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
            commands.push(self.launch(launch, operands)?);
        }
        commands.retain(Command::does_something);
        Ok(commands)
    }

    fn launch(&mut self, launch: &Launch, operands: &Operands) -> Result<Command, RunError> {
        Ok(match launch {
            Launch::Copy { from, to, bytes } => {
                let (to, from) = (operands.pointer(*to), operands.pointer(*from));
                Command::Copy { to, from, bytes: *bytes }
            }
            Launch::Zero { at, bytes } => {
                Command::Zero { at: operands.pointer(*at), bytes: *bytes }
            }
            Launch::Source(kernel) => self.source(kernel, operands)?,
            Launch::Gemm(gemm) => {
                let at = addresses(gemm, operands);
                if gemm.k == 0 || gemm.m * gemm.n * gemm.batch == 0 {
                    return empty_product(gemm, at.d);
                }
                Command::Multiply { product: self.product(gemm, at), at }
            }
            Launch::Operation(_) => return Err(refused("an operation of cuDNN has no fallback")),
            Launch::Choice(candidates) => self.choice(candidates, operands)?,
        })
    }

    fn choice(
        &mut self,
        candidates: &[Candidate],
        operands: &Operands,
    ) -> Result<Command, RunError> {
        let [first, last] = candidates else {
            return Err(refused("a choice is not between a candidate and a fallback"));
        };
        let fallback = self.launches(&last.launches, operands)?;
        if let [Launch::Gemm(gemm)] = &first.launches[..] {
            let at = addresses(gemm, operands);
            let next = self.products.len();
            let product = self.product(gemm, at);
            if product == next {
                self.epilogues.push(EpilogueChoice { product, fallback: fallback.clone() });
            }
            return Ok(Command::Fused { product, at, fallback });
        }
        let (mut candidate, mut found) = (Vec::new(), None);
        for launch in &first.launches {
            let Launch::Operation(OperationLaunch { operation, at }) = launch else {
                candidate.extend(self.launches(std::slice::from_ref(launch), operands)?);
                continue;
            };
            let at: Vec<Address> = at.iter().map(|p| operands.pointer(*p)).collect();
            let workspace = operands.workspace.0;
            let operation = operation.at(&at);
            let next = self.operations.len();
            let index = *self.by_operation.entry(operation.clone()).or_insert(next);
            found = Some((index, operation));
            candidate.push(Command::Execute { operation: index, at, workspace });
        }
        let (index, operation) =
            found.ok_or_else(|| refused("a candidate is neither a GEMM nor an operation"))?;
        if index == self.operations.len() {
            let (candidate, fallback) = (candidate.clone(), fallback.clone());
            self.operations.push(OperationChoice { operation, candidate, fallback });
        }
        Ok(Command::Choice { operation: index, candidate, fallback })
    }

    /// The index of a GEMM, added if it is new.
    fn product(&mut self, gemm: &Gemm, at: ProductAddresses) -> usize {
        let product = Product::of(gemm, &at);
        let next = self.products.len();
        let index = *self.by_product.entry(product.clone()).or_insert(next);
        if index == next {
            self.products.push((product, at));
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
            }
        }
        let SourceKernel { grid, block, shared_bytes, .. } = *kernel;
        Ok(Command::Launch { function, shape: Shape { grid, block, shared_bytes }, arguments })
    }
}

fn addresses(gemm: &Gemm, operands: &Operands) -> ProductAddresses {
    let at = |pointer: Option<Pointer>| pointer.map_or(0, |p| operands.pointer(p));
    let (vector, matrix) = match gemm.epilogue {
        Epilogue::None => (None, None),
        Epilogue::Gelu { bias, before } => (bias, before),
        Epilogue::GeluGrad { before, rows } => (rows, Some(before)),
        Epilogue::Bias(v) | Epilogue::SumA(v) | Epilogue::SumB(v) => (Some(v), None),
    };
    let (workspace, bytes) = operands.workspace;
    ProductAddresses {
        a: at(Some(gemm.a.at)),
        b: at(Some(gemm.b.at)),
        d: at(Some(gemm.d.at)),
        scales: [at(gemm.a.scale), at(gemm.b.scale)],
        vector: at(vector),
        matrix: at(matrix),
        workspace: (workspace, bytes.min(GEMM_WORKSPACE)),
    }
}

/// The error for a plan that the compiler would not write.
fn refused(reason: &str) -> RunError {
    RunError::Plan { path: layout::PLAN.into(), reason: reason.into() }
}

/// A GEMM with an extent of zero: nothing, or zeros.
fn empty_product(gemm: &Gemm, d: Address) -> Result<Command, RunError> {
    let numel = gemm.m * gemm.n * gemm.batch;
    let dense =
        gemm.d.row_stride == gemm.n && (gemm.batch == 1 || gemm.d.batch_stride == gemm.m * gemm.n);
    if numel > 0 && (!dense || gemm.epilogue != Epilogue::None) {
        let reason = "a GEMM over no elements with a bias or gaps has no CUDA kernel".into();
        return Err(RunError::Plan { path: layout::PLAN.into(), reason });
    }
    Ok(Command::Zero { at: d, bytes: numel * gemm.d.dtype.size() })
}
