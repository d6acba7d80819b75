//! The stand-ins of libcuda, cuBLASLt, NVRTC and NCCL in `tests/driver`, compiled once, and processes that load them
//! through the dynamic linker, in which Frit's real driver implementation runs plans and every kernel is computed.

use crate::support::file;
use clap::Parser;
use frit::commands::{Cli, execute};
use frit_ir::plan::sha256_hex;
use frit_runtime::compare;
use frit_runtime::device::cuda::doctor;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;

/// The arguments of a process, a line each.
const ARGUMENTS: &str = "FRIT_TEST_ARGUMENTS";
const FLAGS: &[&str] =
    &["-O1", "-fPIC", "-fvisibility=hidden", "-w", "-pthread", "-U_FORTIFY_SOURCE"];
/// Libraries, and what they are made of.
const LIBRARIES: &[(&str, &[&str])] = &[
    ("libcuda.so.1", &["cuda.cpp", "device.cpp", "elf.cpp", "ptx.cpp"]),
    ("libcublasLt.so.12", &["cublaslt.cpp"]),
    ("libnvrtc.so.12", &["nvrtc.cpp"]),
    ("libnccl.so.2", &["nccl.cpp"]),
];
/// The emulation of CUDA C++ that tests of launches use, and what of the sources it replaces.
const EMULATION: &[&str] = &[
    "kernels/select/tests/cuda/host/cuda.h",
    "kernels/select/tests/cuda/host/fibers.cpp",
    "kernels/library/cuda/ptx.cuh",
];

/// The folder of the compiled stand-ins, named after all that they are made of.
pub(crate) static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let mut sources: Vec<PathBuf> = std::fs::read_dir(file("tests/driver"))
        .expect("the folder")
        .map(|entry| entry.expect("an entry").path())
        .chain(EMULATION.iter().map(|path| file(path)))
        .collect();
    sources.sort();
    let all: Vec<u8> =
        sources.iter().flat_map(|path| std::fs::read(path).expect("a source")).collect();
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let done = target.join(format!("stand-ins-{}", &sha256_hex(&all)[..16]));
    if !done.exists() {
        let aside = tempfile::tempdir_in(target).expect("a directory").keep();
        build(&aside);
        // Another process may have been faster.
        if std::fs::rename(&aside, &done).is_err() {
            std::fs::remove_dir_all(&aside).expect("removed");
        }
        assert!(done.exists());
    }
    done
});

fn build(folder: &Path) {
    for path in EMULATION {
        let from = file(path);
        let name = from.file_name().expect("a name");
        std::fs::copy(&from, folder.join(name)).expect("copied");
    }
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&compiler);
        let status = command.args(FLAGS).args(arguments).current_dir(folder).status();
        assert!(status.expect("a compiler of C++").success(), "{arguments:?}");
    };
    run(&["-std=c++17", "-c", "fibers.cpp", "-o", "fibers.o"]);
    for (library, sources) in LIBRARIES {
        let paths: Vec<PathBuf> = sources.iter().map(|s| file("tests/driver").join(s)).collect();
        let mut arguments = vec!["-std=c++20", "-shared", "-o", library];
        arguments.extend(paths.iter().map(|p| p.to_str().expect("a path in Unicode")));
        arguments.push("-ldl");
        run(&arguments);
    }
    // By the name that goes with newer drivers, too; and a cuDNN without functions, so that this machine's is
    // not taken, which needs a real driver.
    for (from, to) in
        [("libcublasLt.so.12", "libcublasLt.so.13"), ("libcublasLt.so.12", "libcudnn.so.9")]
    {
        std::fs::copy(folder.join(from), folder.join(to)).expect("copied");
    }
}

/// What a process with a GPU is asked to do, and where it may write.
pub(crate) struct Gpu {
    pub(crate) dir: tempfile::TempDir,
    variables: BTreeMap<String, String>,
}

/// What became of a process.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) said: String,
    /// Calls, launches, and violations of rules, by number.
    pub(crate) log: BTreeMap<String, u64>,
}

impl Gpu {
    /// With a GPU like an H100.
    pub(crate) fn new() -> Gpu {
        Gpu { dir: tempfile::tempdir().expect("a directory"), variables: BTreeMap::new() }
    }

    /// Sets what the head of `tests/driver/cuda.cpp` says, or what Frit reads.
    pub(crate) fn with(mut self, name: &str, value: impl ToString) -> Gpu {
        self.variables.insert(name.into(), value.to_string());
        self
    }

    /// Runs `frit` with these arguments.
    pub(crate) fn run(&self, arguments: &[&str]) -> Ended {
        self.rank(arguments, 0, &[]).wait()
    }

    /// Runs `frit` as so many ranks; `more` are variables of one of them.
    pub(crate) fn run_ranks(
        &self,
        arguments: &[&str],
        ranks: usize,
        more: &[(usize, &str, &str)],
    ) -> Vec<Ended> {
        self.start_ranks(arguments, ranks, more).into_iter().map(Started::wait).collect()
    }

    /// The same, without waiting for their ends.
    pub(crate) fn start_ranks(
        &self,
        arguments: &[&str],
        ranks: usize,
        more: &[(usize, &str, &str)],
    ) -> Vec<Started> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port().to_string();
        drop(listener);
        let start = |rank: usize| {
            let [number, count] = [rank, ranks].map(|n| n.to_string());
            let mut variables = vec![
                ("RANK", number.as_str()),
                ("LOCAL_RANK", &number),
                ("WORLD_SIZE", &count),
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", &port),
                // So that all of them take the one GPU.
                ("NCCL_HOSTID", &number),
            ];
            let own = more.iter().filter(|(of, ..)| *of == rank);
            variables.extend(own.map(|(_, name, value)| (*name, *value)));
            self.rank(arguments, rank, &variables)
        };
        (0..ranks).map(start).collect()
    }

    fn rank(&self, arguments: &[&str], rank: usize, variables: &[(&str, &str)]) -> Started {
        let log = self.dir.path().join(format!("log-{rank}"));
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "stand_ins::a_refused_process_ends_with_exit_code_2", "--nocapture"])
            .env(ARGUMENTS, arguments.join("\n"))
            .env("LD_LIBRARY_PATH", &*FOLDER)
            .env("FRIT_DEVICE_FOLDER", &*FOLDER)
            // What was compiled by one test serves the others.
            .env("FRIT_CUDA_CACHE", FOLDER.join("cubins"))
            .env("FRIT_DEVICE_LOG", &log)
            .env("FRIT_DEVICE_SEED", rank.to_string())
            .env("FRIT_TIMEOUT", "120")
            .env("TMPDIR", self.dir.path())
            .env_remove("CUDA_VISIBLE_DEVICES")
            .envs(&self.variables)
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process");
        Started { child, log }
    }
}

/// A process that may not have ended.
pub(crate) struct Started {
    pub(crate) child: Child,
    log: PathBuf,
}

impl Started {
    pub(crate) fn wait(self) -> Ended {
        let Output { status, stdout, stderr } = self.child.wait_with_output().expect("an end");
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let line = |line: &str| {
            let (what, n) = line.rsplit_once('\t').expect("a number at the end");
            (what.to_string(), n.parse().expect("a number"))
        };
        let said = [stdout, stderr].map(|s| String::from_utf8_lossy(&s).into_owned()).concat();
        Ended { code: status.code(), said, log: text.lines().map(line).collect() }
    }
}

impl Ended {
    /// Fails unless all went well and every call was legal.
    pub(crate) fn expect_success(&self) {
        assert_eq!(self.code, Some(0), "{}", self.said);
        self.expect_legal();
    }

    /// Fails unless every call was legal, whatever came of it.
    pub(crate) fn expect_legal(&self) {
        let broken: Vec<&String> =
            self.log.keys().filter(|what| what.starts_with("violation")).collect();
        assert!(broken.is_empty(), "{broken:?}");
    }

    /// How often something is in the log.
    pub(crate) fn count(&self, what: &str) -> u64 {
        self.log.get(what).copied().unwrap_or(0)
    }
}

/// What a process does: `compare` and `doctor`, which are commands of `frit-run`, or what `frit` does.
fn process(arguments: &[&str]) -> Result<String, String> {
    #[derive(clap::Parser)]
    enum Run {
        Compare(compare::Options),
        Doctor(doctor::Options),
    }
    match Run::try_parse_from([&["frit-run"], arguments].concat()) {
        Ok(Run::Compare(options)) => {
            let report = compare::compare(&options).map_err(|e| e.to_string())?;
            let text = report.render(false);
            return if report.is_close() { Ok(text) } else { Err(text) };
        }
        Ok(Run::Doctor(options)) => {
            let findings = doctor::doctor(&options).map_err(|e| e.to_string())?;
            let text = findings.table();
            return findings.complaint().map_or(Ok(text.clone()), |why| Err(text + &why));
        }
        Err(_) => {}
    }
    let cli = Cli::try_parse_from([&["frit"], arguments].concat()).map_err(|e| e.to_string())?;
    execute(&cli).map_err(|report| report.to_string())
}

/// Also what the processes run.
#[test]
fn a_refused_process_ends_with_exit_code_2() {
    if let Ok(arguments) = std::env::var(ARGUMENTS) {
        match process(&arguments.lines().collect::<Vec<_>>()) {
            Ok(text) => return eprintln!("{text}"),
            Err(error) => {
                eprintln!("error: {error}");
                std::process::exit(2);
            }
        }
    }
    let ended = Gpu::new().run(&["run", "no/such/plan", "--data", "data.npz"]);
    assert!(ended.code == Some(2) && ended.said.contains("no/such/plan"), "{ended:?}");
}
