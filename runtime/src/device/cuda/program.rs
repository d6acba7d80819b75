//! A plan's tasks as commands with all addresses bound: what is put on a stream, and nothing left to decide.

use super::command::{Command, settle_operations, settle_products};
use super::cubins::Cubins;
use super::driver::{
    Address, Arguments, Collective, Driver, Exchange, FunctionHandle, ModuleHandle,
    ProductAddresses, Shape, Source, TeamHandle,
};
use super::error::CudaError;
use super::gemm::Product;
use super::memory::{FAULT_WORDS, Memory, Needs, PRODUCT_WORKSPACE, STREAMS, index};
use super::recipe::{
    Argument, Epilogue, Gemm, Launch, Offer, Operation, Pointer, Recipe, SourceKernel,
};
use crate::RunError;
use frit_ir::plan::{Action, CudaLaunch, Entry, Kernel, KernelKind, Place, Plan, Stream, Team};
use frit_kernels::cuda::source;
use std::collections::HashMap;

/// Blocks of a grid-stride loop for each that the device runs at once. A collective's blocks, and those of what
/// runs beside, take the place of some: with more than one round the others take over their work, and a
/// collective starts when the first round ends, not the kernel.
const ROUNDS: u32 = 4;

/// How a kernel of the plan is executed.
enum Code<'a> {
    Generated { launches: &'a [CudaLaunch], scratch_bytes: usize },
    Recipe(Recipe),
}

/// What is known of a plan's kernels before there is memory.
pub(super) struct Survey<'a> {
    code: Vec<Code<'a>>,
    /// What kernels need, by stream.
    pub(super) needs: [Needs; STREAMS],
    /// Tasks that may report a fault, ascending.
    pub(super) faulting: Vec<usize>,
}

/// The commands of every task.
pub(super) struct Program {
    /// By task.
    pub(super) commands: Vec<Vec<Command>>,
    /// The matrix products, each once, with the addresses of the first task that wants it.
    pub(super) products: Vec<(Product, ProductAddresses)>,
    /// The operations that cuDNN may compute, each once.
    pub(super) operations: Vec<Offered>,
}

/// An operation that cuDNN may compute, with the commands of the first task that wants it.
#[derive(Clone, Debug)]
pub(super) struct Offered {
    pub(super) operation: Operation,
    /// Bytes that an engine may use.
    pub(super) workspace_bytes: usize,
    /// The operation and what runs around it.
    pub(super) with: Vec<Command>,
    /// What does the same.
    pub(super) otherwise: Vec<Command>,
}

impl<'a> Survey<'a> {
    /// Finds how every kernel is executed.
    ///
    /// # Errors
    /// A kernel that has no code for GPUs.
    pub(super) fn of(plan: &'a Plan) -> Result<Survey<'a>, RunError> {
        let code: Vec<Code> = plan.kernels.iter().map(Code::of).collect::<Result<_, _>>()?;
        let mut needs = [Needs::default(); STREAMS];
        let mut faulting = Vec::new();
        for (i, task) in plan.tasks.iter().enumerate() {
            let Action::Kernel { kernel, .. } = &task.action else { continue };
            let need = &mut needs[index(task.stream)];
            match &code[*kernel] {
                Code::Generated { scratch_bytes, .. } => {
                    need.scratch_bytes = need.scratch_bytes.max(*scratch_bytes);
                }
                Code::Recipe(recipe) => {
                    need.scratch_bytes = need.scratch_bytes.max(recipe.scratch_bytes);
                    let launches = recipe.every_launch();
                    let is_product = |l: &&Launch| matches!(l, Launch::Gemm(_) | Launch::Fused(..));
                    need.products |= launches.iter().any(is_product);
                    for launch in &launches {
                        let Launch::Offer(offer) = launch else { continue };
                        let bytes = offer.operation.workspace_bytes();
                        need.operations_bytes = need.operations_bytes.max(bytes);
                    }
                    if launches.iter().any(|launch| reports_faults(launch)) {
                        faulting.push(i);
                    }
                }
            }
        }
        Ok(Survey { code, needs, faulting })
    }

    /// Whether any kernel is CUDA C++.
    pub(super) fn sources(&self) -> bool {
        let is_source = |launch: &&Launch| matches!(launch, Launch::Source(_));
        self.code.iter().any(|code| match code {
            Code::Generated { .. } => false,
            Code::Recipe(recipe) => recipe.every_launch().iter().any(is_source),
        })
    }
}

impl Code<'_> {
    fn of(kernel: &Kernel) -> Result<Code<'_>, RunError> {
        let refuse = |reason: String| RunError::Plan { path: "plan.json".into(), reason };
        match (kernel.kind, &kernel.entry) {
            (KernelKind::Generated, Some(Entry::Cuda { launches, scratch_bytes })) => {
                Ok(Code::Generated { launches, scratch_bytes: *scratch_bytes })
            }
            (KernelKind::Generated, _) => {
                Err(refuse(format!("kernel `{}` has no code for a GPU", kernel.name)))
            }
            _ => Recipe::of(&kernel.body).map(Code::Recipe).ok_or_else(|| {
                let why = "has no CUDA kernel; compile the plan with this version of Frit";
                refuse(format!("kernel `{}` {why}", kernel.name))
            }),
        }
    }
}

fn reports_faults(launch: &Launch) -> bool {
    let Launch::Source(kernel) = launch else { return false };
    kernel.arguments.iter().any(|a| matches!(a, Argument::Pointer(Pointer::Fault)))
}

/// Operands of one task.
struct Operands<'a> {
    task: usize,
    reads: &'a [Place],
    writes: &'a [Place],
    stream: Stream,
}

/// CUDA C++ by its file and what is defined for it.
type Unit = (&'static str, Vec<(&'static str, String)>);

/// Every module of CUDA C++ that the kernels need, loaded.
fn modules(
    survey: &Survey<'_>,
    driver: &impl Driver,
    cubins: &Cubins,
) -> Result<HashMap<Unit, ModuleHandle>, CudaError> {
    let recipes = survey.code.iter().filter_map(|code| match code {
        Code::Recipe(recipe) => Some(recipe),
        Code::Generated { .. } => None,
    });
    let launches = recipes.flat_map(Recipe::every_launch);
    let mut units: Vec<Unit> = Vec::new();
    for launch in launches {
        let Launch::Source(kernel) = launch else { continue };
        let unit = (kernel.file, kernel.defines.clone());
        if !units.contains(&unit) {
            units.push(unit);
        }
    }
    let mut sources = Vec::with_capacity(units.len());
    for (file, defines) in &units {
        let text = source(file).ok_or_else(|| CudaError::Compile {
            file: (*file).into(),
            compiler: "Frit".into(),
            reason: "no such source".into(),
        })?;
        sources.push(Source { file, text, defines });
    }
    let codes = cubins.code(driver, &sources)?;
    let mut modules = HashMap::new();
    for (unit, code) in units.into_iter().zip(codes) {
        let module = driver.load(&format!("{}.cu", unit.0), &code)?;
        modules.insert(unit, module);
    }
    Ok(modules)
}

/// What is needed to bind tasks.
struct Binder<'a, D> {
    plan: &'a Plan,
    driver: &'a D,
    memory: &'a Memory,
    faulting: &'a [usize],
    /// The plan's own module.
    generated: Option<ModuleHandle>,
    modules: HashMap<Unit, ModuleHandle>,
    functions: HashMap<(ModuleHandle, String, u32), FunctionHandle>,
    /// Blocks of a kernel that the device runs at once.
    resident: HashMap<FunctionHandle, u32>,
    rank: usize,
    teams: Vec<(Team, TeamHandle)>,
    products: Vec<(Product, ProductAddresses)>,
    by_product: HashMap<Product, usize>,
    operations: Vec<Offered>,
    by_operation: HashMap<Operation, usize>,
}

impl Program {
    /// Loads the code of every kernel and binds every task. `ptx` is the plan's own module.
    ///
    /// # Errors
    /// Code that cannot be compiled or loaded.
    pub(super) fn bind<D: Driver>(
        plan: &Plan,
        survey: &Survey,
        driver: &D,
        memory: &Memory,
        ptx: Option<&str>,
        cubins: &Cubins,
        rank: usize,
    ) -> Result<Program, RunError> {
        let file = plan.object.as_ref().map_or("", |o| o.file.as_str());
        let generated = ptx.map(|text| driver.load(file, text.as_bytes())).transpose()?;
        let modules = modules(survey, driver, cubins)?;
        let mut binder = Binder {
            plan,
            driver,
            memory,
            faulting: &survey.faulting,
            generated,
            modules,
            functions: HashMap::new(),
            resident: HashMap::new(),
            rank,
            teams: Vec::new(),
            products: Vec::new(),
            by_product: HashMap::new(),
            operations: Vec::new(),
            by_operation: HashMap::new(),
        };
        let mut commands = Vec::with_capacity(plan.tasks.len());
        for (i, task) in plan.tasks.iter().enumerate() {
            commands.push(match &task.action {
                Action::Kernel { kernel, reads, writes } => {
                    let operands = Operands { task: i, reads, writes, stream: task.stream };
                    binder.kernel(&survey.code[*kernel], &operands)?
                }
                other => binder.transfer(other)?,
            });
        }
        Ok(Program { commands, products: binder.products, operations: binder.operations })
    }

    /// Decides which products keep their epilogue: those that have an algorithm with it.
    pub(super) fn settle_products(&mut self, has_algorithm: impl Fn(usize) -> bool) {
        let offered = self.operations.iter_mut().flat_map(|o| [&mut o.with, &mut o.otherwise]);
        for commands in self.commands.iter_mut().chain(offered) {
            settle_products(commands, &has_algorithm);
        }
    }

    /// Decides which operations cuDNN computes: those that have an engine.
    pub(super) fn settle_operations(&mut self, has_engine: impl Fn(usize) -> bool) {
        for commands in &mut self.commands {
            settle_operations(commands, &has_engine);
        }
    }
}

impl<D: Driver> Binder<'_, D> {
    fn at(&self, place: &Place) -> Address {
        self.memory.place(self.plan, place)
    }

    /// Copies, zeros and collectives.
    fn transfer(&mut self, action: &Action) -> Result<Vec<Command>, CudaError> {
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

    /// The team of a collective, made when it is first met: the order is that of the plan on every rank.
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

    fn kernel(&mut self, code: &Code, operands: &Operands) -> Result<Vec<Command>, RunError> {
        let mut commands = Vec::new();
        match code {
            Code::Generated { launches, scratch_bytes } => {
                let mut arguments = Arguments::default();
                for place in operands.reads.iter().chain(operands.writes) {
                    arguments.push(self.at(place));
                }
                if *scratch_bytes > 0 {
                    arguments.push(self.memory.scratch[index(operands.stream)]);
                }
                let module = self.generated.ok_or_else(|| RunError::Plan {
                    path: "plan.json".into(),
                    reason: "the plan names no file with its kernels".into(),
                })?;
                for launch in *launches {
                    let mut grid = [launch.grid[0], launch.grid[1], 1];
                    let function = self.function(module, &launch.symbol, 0)?;
                    if launch.grid_stride {
                        let most = self.resident_blocks(function, launch.block)?;
                        grid[0] = grid[0].min(most.saturating_mul(ROUNDS));
                    }
                    let shape = Shape { grid, block: launch.block, shared_bytes: 0 };
                    let arguments = arguments.clone();
                    commands.push(Command::Launch { function, shape, arguments });
                }
            }
            Code::Recipe(recipe) => {
                commands = self.launches(&recipe.launches, operands)?;
            }
        }
        commands.retain(Command::does_something);
        Ok(commands)
    }

    /// The commands of launches, but for those that do nothing.
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
                let (to, from) = (self.pointer(*to, operands), self.pointer(*from, operands));
                Command::Copy { to, from, bytes: *bytes }
            }
            Launch::Zero { at, bytes } => {
                Command::Zero { at: self.pointer(*at, operands), bytes: *bytes }
            }
            Launch::Source(kernel) => self.source(kernel, operands)?,
            Launch::Gemm(gemm) => {
                let at = self.addresses(gemm, operands);
                if gemm.k == 0 || gemm.m * gemm.n * gemm.batch == 0 {
                    return empty_product(gemm, at.d);
                }
                Command::Multiply { product: self.product(gemm, at), at }
            }
            Launch::Fused(gemm, otherwise) => {
                let at = self.addresses(gemm, operands);
                let product = self.product(gemm, at);
                Command::Fused { product, at, otherwise: self.launches(otherwise, operands)? }
            }
            Launch::Offer(offer) => self.offer(offer, operands)?,
        })
    }

    fn addresses(&self, gemm: &Gemm, operands: &Operands) -> ProductAddresses {
        let at = |pointer: Option<Pointer>| pointer.map_or(0, |p| self.pointer(p, operands));
        let (vector, matrix) = match gemm.epilogue {
            Epilogue::None => (None, None),
            Epilogue::Gelu { bias, before } => (bias, before),
            Epilogue::GeluGrad { before, rows } => (rows, Some(before)),
            Epilogue::Bias(v) | Epilogue::SumA(v) | Epilogue::SumB(v) => (Some(v), None),
        };
        let (workspace, bytes) = self.memory.libraries[index(operands.stream)];
        ProductAddresses {
            a: at(Some(gemm.a.at)),
            b: at(Some(gemm.b.at)),
            d: at(Some(gemm.d.at)),
            scales: [at(gemm.a.scale), at(gemm.b.scale)],
            vector: at(vector),
            matrix: at(matrix),
            workspace: (workspace, bytes.min(PRODUCT_WORKSPACE)),
        }
    }

    fn offer(&mut self, offer: &Offer, operands: &Operands) -> Result<Command, RunError> {
        let at: Vec<Address> = offer.at.iter().map(|p| self.pointer(*p, operands)).collect();
        let (workspace, workspace_bytes) = self.memory.libraries[index(operands.stream)];
        let operation = offer.operation.at(&at);
        let next = self.operations.len();
        let index = *self.by_operation.entry(operation.clone()).or_insert(next);
        let mut with = self.launches(&offer.before, operands)?;
        with.push(Command::Execute { operation: index, at, workspace });
        with.extend(self.launches(&offer.after, operands)?);
        let otherwise = self.launches(&offer.otherwise, operands)?;
        if index == next {
            let (with, otherwise) = (with.clone(), otherwise.clone());
            self.operations.push(Offered { operation, workspace_bytes, with, otherwise });
        }
        Ok(Command::Offer { operation: index, with, otherwise })
    }

    /// The index of a product, which is new if none is like it.
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
        let unit = (kernel.file, kernel.defines.clone());
        let module = self.modules[&unit];
        let function = self.function(module, kernel.entry, kernel.shared_bytes)?;
        let mut arguments = Arguments::default();
        for argument in &kernel.arguments {
            match argument {
                Argument::Pointer(p) => arguments.push(self.pointer(*p, operands)),
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

    /// A kernel of a module, looked up once.
    fn function(
        &mut self,
        module: ModuleHandle,
        name: &str,
        shared_bytes: u32,
    ) -> Result<FunctionHandle, CudaError> {
        let key = (module, name.to_string(), shared_bytes);
        if let Some(function) = self.functions.get(&key) {
            return Ok(*function);
        }
        let function = self.driver.function(module, name, shared_bytes)?;
        self.functions.insert(key, function);
        Ok(function)
    }

    /// Blocks of a kernel of the plan that the device runs at once, asked for once.
    fn resident_blocks(&mut self, function: FunctionHandle, block: u32) -> Result<u32, CudaError> {
        if let Some(blocks) = self.resident.get(&function) {
            return Ok(*blocks);
        }
        let blocks = self.driver.resident_blocks(function, block)?.max(1);
        self.resident.insert(function, blocks);
        Ok(blocks)
    }

    fn pointer(&self, pointer: Pointer, operands: &Operands) -> Address {
        match pointer {
            Pointer::Read(i, at) => self.at(&operands.reads[i]) + at as Address,
            Pointer::Write(i, at) => self.at(&operands.writes[i]) + at as Address,
            Pointer::Scratch(at) => self.memory.scratch[index(operands.stream)] + at as Address,
            Pointer::Fault => {
                let slot = self.faulting.binary_search(&operands.task).unwrap_or_default();
                fault_address(self.plan, self.memory, slot)
            }
        }
    }
}

/// A product of which an extent is zero: nothing, or zeros.
fn empty_product(gemm: &Gemm, d: Address) -> Result<Command, RunError> {
    let numel = gemm.m * gemm.n * gemm.batch;
    let dense =
        gemm.d.row_stride == gemm.n && (gemm.batch == 1 || gemm.d.batch_stride == gemm.m * gemm.n);
    if numel > 0 && (!dense || gemm.epilogue != Epilogue::None) {
        let reason = "a product over no elements with a bias or gaps has no CUDA kernel".into();
        return Err(RunError::Plan { path: "plan.json".into(), reason });
    }
    Ok(Command::Zero { at: d, bytes: numel * gemm.d.dtype.size() })
}

/// Where a task that may report a fault reports it.
fn fault_address(plan: &Plan, memory: &Memory, slot: usize) -> Address {
    let metrics = (plan.metrics.len() * 4).next_multiple_of(8);
    memory.report + (metrics + slot * FAULT_WORDS * 8) as Address
}
