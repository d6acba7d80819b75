//! What some tests need beyond the workspace. `.ci/setup.sh` fetches all of it.
//!
//! A test whose requirement is missing would pass without testing anything, so it reports that here: if `FRIT_REQUIRE`
//! (words separated by commas, or `all`) includes the requirement, the test fails; otherwise the skip is recorded in
//! the file `FRIT_SKIPPED`, which `make test` summarizes.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Something that tests need beyond the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// NVIDIA's assembler: `$FRIT_PTXAS`, or `ptxas` in the path.
    Ptxas,
    /// The library NVRTC: `$FRIT_NVRTC`.
    Nvrtc,
    /// The folders of cuDNN's libraries and of those that they load, separated as in `PATH`: `$FRIT_CUDNN`.
    Cudnn,
    /// The folder of ONNX's backend tests: `$FRIT_ONNX_TESTS`, or where `.ci/setup.sh` puts them.
    OnnxTests,
    /// Where Python finds NumPy and pytest: `$FRIT_PYTHON`, or where `.ci/setup.sh` puts them.
    Python,
    /// Where Python finds onnx, onnxruntime and tokenizers: `$FRIT_ONNXRUNTIME`, or where `.ci/setup.sh` puts them.
    Onnxruntime,
    /// The solver: `$FRIT_Z3`, or `z3` in the path.
    Z3,
    /// The browser: `$FRIT_CHROMIUM`, or `chromium` in the path.
    Chromium,
}

impl Requirement {
    /// The word that `FRIT_REQUIRE` takes.
    pub fn word(self) -> &'static str {
        match self {
            Requirement::Ptxas => "ptxas",
            Requirement::Nvrtc => "nvrtc",
            Requirement::Cudnn => "cudnn",
            Requirement::OnnxTests => "onnx-tests",
            Requirement::Python => "python",
            Requirement::Onnxruntime => "onnxruntime",
            Requirement::Z3 => "z3",
            Requirement::Chromium => "chromium",
        }
    }

    /// Where it is. Nothing if it is lacking, which is then noted.
    ///
    /// # Panics
    /// If it is lacking and `FRIT_REQUIRE` names it.
    pub fn find(self) -> Option<PathBuf> {
        let found = self.candidate();
        if found.is_none() {
            self.lacking();
        }
        found
    }

    fn candidate(self) -> Option<PathBuf> {
        let given = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let fetched = |path: &str| Some(workspace().join(path)).filter(|path| path.is_dir());
        match self {
            Requirement::Ptxas => given("FRIT_PTXAS").or_else(|| in_path("ptxas")),
            Requirement::Z3 => given("FRIT_Z3").or_else(|| in_path("z3")),
            Requirement::Chromium => given("FRIT_CHROMIUM").or_else(|| in_path("chromium")),
            Requirement::Nvrtc => given("FRIT_NVRTC"),
            Requirement::Cudnn => given("FRIT_CUDNN"),
            Requirement::OnnxTests => given("FRIT_ONNX_TESTS")
                .or_else(|| fetched("target/onnx-tests/site/onnx/backend/test/data")),
            Requirement::Python => given("FRIT_PYTHON").or_else(|| fetched("target/python")),
            Requirement::Onnxruntime => {
                given("FRIT_ONNXRUNTIME").or_else(|| fetched("target/onnxruntime"))
            }
        }
    }

    fn lacking(self) {
        let word = self.word();
        let thread = std::thread::current();
        let test = thread.name().unwrap_or("a test");
        let required = std::env::var("FRIT_REQUIRE").unwrap_or_default();
        let required = required.split(',').any(|w| w == word || w == "all");
        assert!(!required, "{test} needs {word}, which FRIT_REQUIRE names: see .ci/setup.sh");
        eprintln!("skipped: {test} needs {word}, which .ci/setup.sh fetches");
        if let Some(path) = std::env::var_os("FRIT_SKIPPED") {
            let file = OpenOptions::new().create(true).append(true).open(path);
            let noted =
                file.and_then(|mut file| file.write_all(format!("{word}: {test}\n").as_bytes()));
            noted.expect("the file that FRIT_SKIPPED names can be written");
        }
    }
}

/// A program that starts by its name.
fn in_path(name: &str) -> Option<PathBuf> {
    let version = Command::new(name).arg("--version").output();
    version.is_ok_and(|o| o.status.success()).then(|| name.into())
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}
