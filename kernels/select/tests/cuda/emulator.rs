//! Executes launches on the CPU.

use crate::memory::{Range, load, store};
use crate::{gemms, operations};
use frit_ir::interpret::{Options, run};
use frit_ir::ops::FusionKind;
use frit_ir::plan::{
    Argument, Epilogue, Gemm, GeneratedLaunch, Launch, OperationLaunch, Pointer, SourceKernel,
};
use frit_ir::{DType, Graph, Op, Tensor};
use frit_select::Selected;
use std::collections::HashMap;
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex};

/// A compiled file; its threads share static memory, so only one launch runs at a time.
type Compiled = Arc<Mutex<libloading::Library>>;

/// The order in which the threads of a block run: ascending or descending.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Order {
    Ascending,
    Descending,
}

/// The memory of a task: operands, results, scratch memory and the fault.
pub(crate) struct Task {
    pub(crate) reads: Vec<Range>,
    pub(crate) writes: Vec<Range>,
    scratch: Range,
    fault: Range,
    generated: Vec<(Graph, FusionKind)>,
}

impl Task {
    pub(crate) fn new(selected: &Selected, reads: Vec<Range>, writes: Vec<Range>) -> Task {
        let fault = Range::of(&[0; 24], 0);
        let scratch = Range::new(selected.entry.most_scratch_bytes(), 0);
        Task { reads, writes, scratch, fault, generated: selected.generated.clone() }
    }

    /// An index out of range and the size of its axis, if a kernel reported one.
    pub(crate) fn fault(&self) -> Option<(i64, i64)> {
        let word = |i: usize| {
            i64::from_le_bytes(self.fault.content()[i * 8..i * 8 + 8].try_into().unwrap())
        };
        (word(0) != 0).then(|| (word(1), word(2)))
    }

    /// Runs all launches; with `libraries`, cuBLASLt has an algorithm for every epilogue and cuDNN an engine for every
    /// operation.
    pub(crate) fn run(&mut self, selected: &Selected, order: Order, libraries: bool) {
        self.launches(&selected.entry.launches, order, libraries);
        let all = self.reads.iter().chain(&self.writes).chain([&self.scratch, &self.fault]);
        assert!(all.into_iter().all(Range::is_intact), "a write outside of a result");
    }

    fn launches(&mut self, launches: &[Launch], order: Order, libraries: bool) {
        for launch in launches {
            match launch {
                Launch::Choice(candidates) => {
                    let chosen = if libraries { candidates.first() } else { candidates.last() };
                    let chosen = &chosen.expect("a candidate").launches;
                    self.launches(chosen, order, libraries);
                }
                launch => self.launch(launch, order),
            }
        }
    }

    fn operation(&mut self, launch: &OperationLaunch) {
        let OperationLaunch { operation, at } = launch;
        let sized = at.iter().zip(&operation.tensors);
        let mut tensors: Vec<Vec<u8>> = sized
            .map(|(at, tensor)| self.bytes(*at)[..operations::span_bytes(tensor)].to_vec())
            .collect();
        operations::run(operation, &mut tensors);
        // Bytes between the elements belong to other tensors.
        for &i in operation.results() {
            let (tensor, size) = (&operation.tensors[i], operation.tensors[i].dtype.size());
            let to = self.bytes(at[i]);
            for place in operations::places(tensor).into_iter().map(|place| place * size) {
                to[place..place + size].copy_from_slice(&tensors[i][place..place + size]);
            }
        }
    }

    fn launch(&mut self, launch: &Launch, order: Order) {
        match launch {
            Launch::Source(kernel) => self.source(kernel, order),
            Launch::Copy { from, to, bytes } => {
                let source = self.range(*from).content()[from_byte(*from)..][..*bytes].to_vec();
                self.bytes(*to)[..*bytes].copy_from_slice(&source);
            }
            Launch::Zero { at, bytes } => self.bytes(*at)[..*bytes].fill(0),
            Launch::Gemm(gemm) => self.matmul(gemm),
            Launch::Generated(launch) => self.generated(launch),
            Launch::Operation(launch) => self.operation(launch),
            Launch::Choice(_) => unreachable!("a choice"),
        }
    }

    /// Interprets the body of a generated kernel.
    fn generated(&mut self, launch: &GeneratedLaunch) {
        let body = self.generated[launch.kernel.0].0.clone();
        let inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
        let mut feeds = HashMap::new();
        for (i, ((_, node), at)) in inputs.zip(&launch.reads).enumerate() {
            let ty = body.ty(node.outputs[0]);
            let bytes = &self.bytes(*at)[..ty.bytes()];
            feeds.insert(i.to_string(), Tensor::from_bytes(ty.clone(), bytes).expect("a tensor"));
        }
        let results = run(&body, &feeds, Options::default()).unwrap_or_else(|e| panic!("{e}"));
        for ((_, result), at) in results.iter().zip(&launch.writes) {
            self.bytes(*at)[..result.ty.bytes()].copy_from_slice(&result.to_bytes());
        }
    }

    fn matmul(&mut self, gemm: &Gemm) {
        let copy = |task: &mut Task, at: Option<Pointer>| at.map(|at| task.bytes(at).to_vec());
        let (a, b) = (copy(self, Some(gemm.a.at)), copy(self, Some(gemm.b.at)));
        let (vector, matrix) = match gemm.epilogue {
            Epilogue::Bias(v) => (Some(v), None),
            Epilogue::Gelu { bias, .. } => (bias, None),
            Epilogue::GeluGrad { before, .. } => (None, Some(before)),
            Epilogue::Add { matrix, bias } => (bias, Some(matrix)),
            _ => (None, None),
        };
        let (vector, matrix) = (copy(self, vector), copy(self, matrix));
        let [a, b] = [a, b].map(Option::unwrap_or_default);
        let scale =
            |at: Option<Pointer>| copy(self, at).map_or(1.0, |bytes| load(&bytes, DType::F32, 0));
        let scales = [gemm.a.scale, gemm.b.scale].map(scale);
        let done = gemms::run(gemm, [&a, &b], scales, vector.as_deref(), matrix.as_deref());
        let put = |task: &mut Task, at: Pointer, n: usize, x: &dyn Fn(usize) -> (usize, f64)| {
            for (place, x) in (0..n).map(x) {
                store(task.bytes(at), gemm.d.dtype, place, x);
            }
        };
        let (n, size) = (gemm.n, done.d.len());
        put(self, gemm.d.at, size, &|i| (gemms::place_of(gemm, i), done.d[i]));
        match gemm.epilogue {
            Epilogue::Gelu { before: Some(at), .. } => {
                put(self, at, size, &|i| (i, done.before[i]));
            }
            Epilogue::GeluGrad { rows: Some(at), .. } | Epilogue::SumB(at) => {
                put(self, at, n, &|i| (i, done.sums[i]));
            }
            Epilogue::SumA(at) => put(self, at, gemm.m, &|i| (i, done.sums[i])),
            _ => {}
        }
    }

    fn range(&mut self, at: Pointer) -> &mut Range {
        match at {
            Pointer::Read(i, _) => &mut self.reads[i],
            Pointer::Write(i, _) => &mut self.writes[i],
            Pointer::Scratch(_) => &mut self.scratch,
            Pointer::Fault => &mut self.fault,
        }
    }

    fn bytes(&mut self, at: Pointer) -> &mut [u8] {
        &mut self.range(at).content_mut()[from_byte(at)..]
    }

    fn source(&mut self, kernel: &SourceKernel, order: Order) {
        let mut values: Vec<Vec<u8>> = Vec::new();
        for argument in &kernel.arguments {
            values.push(match argument {
                Argument::Pointer(at) => {
                    let begin = self.range(*at).pointer() as usize;
                    (begin + from_byte(*at)).to_ne_bytes().to_vec()
                }
                Argument::I64(x) => x.to_ne_bytes().to_vec(),
                Argument::F32(x) => x.to_ne_bytes().to_vec(),
                Argument::F64(x) => x.to_ne_bytes().to_vec(),
                Argument::Words(x) => x.iter().flat_map(|w| w.to_ne_bytes()).collect(),
                Argument::Pointers(at) => {
                    let bytes = |at: &Pointer| {
                        (self.range(*at).pointer() as usize + from_byte(*at)).to_ne_bytes()
                    };
                    at.iter().flat_map(bytes).collect()
                }
            });
        }
        let mut pointers: Vec<*mut c_void> =
            values.iter_mut().map(|v| v.as_mut_ptr().cast()).collect();
        let compiled = compiled(kernel);
        let library = compiled.lock().unwrap_or_else(|e| e.into_inner());
        let symbol = format!("launch_{}", kernel.entry);
        type Launcher = extern "C" fn(*const u32, u32, u32, i32, *mut *mut c_void);
        // SAFETY: the launcher was generated with this signature; the arguments are the kernel's.
        unsafe {
            let launch = library.get::<Launcher>(symbol.as_bytes());
            let launch = launch.unwrap_or_else(|e| panic!("{}: {e}", kernel.entry));
            let reversed = i32::from(order == Order::Descending);
            let (grid, arguments) = (kernel.grid.as_ptr(), pointers.as_mut_ptr());
            launch(grid, kernel.block, kernel.shared_bytes, reversed, arguments);
        }
    }
}

fn from_byte(at: Pointer) -> usize {
    match at {
        Pointer::Read(_, at) | Pointer::Write(_, at) | Pointer::Scratch(at) => at,
        Pointer::Fault => 0,
    }
}

fn host(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/host").join(file)
}

fn hash_of(all: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    all.hash(&mut hasher);
    hasher.finish()
}

/// Compiles a file with `flags` into one named by the digest of its inputs. Symbols other than launchers are hidden:
/// shared memory in an inline function would otherwise be shared by all loaded libraries.
fn build(name: &str, source: &str, flags: &[String]) -> PathBuf {
    let header = std::fs::read_to_string(host("cuda.h")).unwrap();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-host");
    std::fs::create_dir_all(&dir).unwrap();
    let stem = format!("{name}-{:016x}", hash_of((source, &header, flags)));
    let done = dir.join(&stem);
    if !done.exists() {
        let unique = format!("{stem}.{}.{:?}", std::process::id(), std::thread::current().id());
        let (from, to) = (dir.join(format!("{unique}.cpp")), dir.join(format!("{unique}.part")));
        std::fs::write(&from, source).unwrap();
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let status = Command::new(&compiler)
            .args([
                "-std=c++17",
                "-O1",
                "-fPIC",
                "-fvisibility=hidden",
                "-w",
                "-U_FORTIFY_SOURCE",
                "-I",
            ])
            .arg(host(""))
            .arg(&from)
            .args(flags)
            .arg("-o")
            .arg(&to)
            .status()
            .unwrap_or_else(|e| panic!("{compiler}: {e}"));
        assert!(status.success(), "{name} with {flags:?} does not compile");
        std::fs::remove_file(&from).unwrap();
        std::fs::rename(&to, &done).unwrap();
    }
    done
}

/// The object file of the scheduler.
fn scheduler() -> &'static str {
    static FILE: LazyLock<String> = LazyLock::new(|| {
        let source = std::fs::read_to_string(host("fibers.cpp")).unwrap();
        build("fibers", &source, &["-c".into()]).to_str().expect("a path in Unicode").into()
    });
    &FILE
}

/// The library of a kernel's file and definitions.
fn compiled(kernel: &SourceKernel) -> Compiled {
    type Cache = HashMap<(String, Vec<(String, String)>), Compiled>;
    static CACHE: LazyLock<Mutex<Cache>> = LazyLock::new(Mutex::default);
    let key = (kernel.file.clone(), kernel.defines.clone());
    if let Some(found) = CACHE.lock().unwrap_or_else(|e| e.into_inner()).get(&key) {
        return found.clone();
    }
    let source = frit_kernels::cuda::source(&kernel.file);
    let source = source.unwrap_or_else(|| panic!("no file {}", kernel.file));
    let mut flags: Vec<String> = kernel.defines.iter().map(|(k, v)| format!("-D{k}={v}")).collect();
    // Resets the language for the object file, which is not C++ source.
    flags.extend(["-shared", "-x", "none", scheduler()].map(String::from));
    let path = build(&kernel.file, &on_host(source), &flags);
    // SAFETY: the library has no initializers of its own.
    let library = unsafe { libloading::Library::new(&path) }.unwrap_or_else(|e| panic!("{e}"));
    let library = Arc::new(Mutex::new(library));
    // Two tests may have loaded it: they share its memory, and must share its lock.
    CACHE.lock().unwrap_or_else(|e| e.into_inner()).entry(key).or_insert(library).clone()
}

/// The source with the emulated instructions, and a launcher for each kernel.
fn on_host(source: &str) -> String {
    let kernels = source.strip_prefix(frit_kernels::cuda::INSTRUCTIONS).expect("the instructions");
    let mut all = format!("#include \"cuda.h\"\n{kernels}\n");
    for part in kernels.split("extern \"C\" __global__ void").skip(1) {
        let head = part.trim_start();
        let head = match head.strip_prefix("__launch_bounds__") {
            Some(rest) => rest.split_once(')').expect("the bounds").1.trim_start(),
            None => head,
        };
        let name = head.split('(').next().expect("a name");
        all += &format!(
            "extern \"C\" EXPORTED void launch_{name}(const u32* grid, u32 block, u32 shared, int reversed, \
             void** arguments) {{ host::launch({name}, grid, block, shared, reversed != 0, arguments); }}\n"
        );
    }
    all
}
