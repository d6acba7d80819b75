//! Reports what this machine has of what a plan needs, for `frit doctor` and `frit-run doctor`: the processor, or the driver,
//! GPUs and libraries.

use super::ceilings::{self, Ceilings};
use super::open::needs;
use crate::RunError;
use crate::plan_dir;
use frit_cuda::Machine;
use frit_cuda::{CudaError, Libraries, Real, installed};
use frit_ir::plan::{DeviceType, Plan};
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;

/// Options of `frit-run doctor`.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(after_help = "Examples:
  frit-run doctor                    # what there is; exit code 0
  frit-run doctor plan               # and what the plan needs; exit code 2 if that is missing
  frit-run doctor --measure          # and what GPU 0 reaches: a bf16 GEMM of 8192x8192x8192, a copy of 4 GiB
  frit-run doctor plan --json        # the same for programs: findings (what, found, problem, needed),
                                     # memory_bytes, ceilings

Libraries are searched in the directories that FRIT_CUDA_PATH names, on the path of the dynamic linker
(LD_LIBRARY_PATH), and in the Python wheels that PyTorch installs, in this order.")]
pub struct Options {
    /// The plan directory.
    pub plan: Option<PathBuf>,
    /// Also measure what GPU 0 reaches, with GEMMs of this size.
    #[arg(
        long,
        value_name = "SIZE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "8192",
        value_parser = clap::value_parser!(u32).range(1..=65536)
    )]
    pub measure: Option<u32>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// A requirement, present or missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is.
    pub what: String,
    /// Version and place, if it can be used.
    pub found: Option<String>,
    /// Why it cannot be used, and what to do.
    pub problem: Option<String>,
    /// Whether the plan needs it; `None` without a plan.
    pub needed: Option<bool>,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Findings {
    /// Processor, driver, devices, libraries.
    pub findings: Vec<Finding>,
    /// Memory that each rank of the plan needs on its GPU, in bytes.
    pub memory_bytes: Option<usize>,
    /// What GPU 0 reaches, if that was measured.
    pub ceilings: Option<Ceilings>,
}

impl Findings {
    /// Whether something that the plan needs is missing.
    pub fn lacking(&self) -> bool {
        self.lacks().next().is_some()
    }

    /// What is missing that the plan needs, in a sentence.
    pub fn complaint(&self) -> Option<String> {
        let all: Vec<&str> = self.lacks().map(|f| f.what.as_str()).collect();
        let text = || format!("this machine lacks what the plan needs: {}", all.join(", "));
        (!all.is_empty()).then(text)
    }

    fn lacks(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|f| f.needed == Some(true) && f.found.is_none())
    }

    /// A line each.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let mut line = |what: &str, state: &str, detail: &str| {
            let _ = writeln!(text, "{what:<10} {state:<10} {detail}");
        };
        for Finding { what, found, problem, needed } in &self.findings {
            let state = match (found, needed) {
                (Some(_), _) => "found",
                (None, Some(false)) => "not needed",
                (None, _) => "missing",
            };
            line(what, state, found.as_ref().or(problem.as_ref()).map_or("", String::as_str));
        }
        if let Some(c) = &self.ceilings {
            let (size, rate, n) = (c.size, c.gemm_flops_per_s / 1e12, c.algorithms);
            let gemm =
                format!("bf16 {size}x{size}x{size}: {rate:.1} TFLOP/s, best of {n} algorithms");
            line("GEMM", "measured", &gemm);
            let (size, rate) = (gib(c.copied_bytes), c.copy_bytes_per_s / 1e9);
            line("copy", "measured", &format!("of {size}: {rate:.0} GB/s read and written"));
        }
        text
    }

    /// As JSON.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("invariant: findings serialize") + "\n"
    }

    fn add(
        &mut self,
        what: impl Into<String>,
        needed: Option<bool>,
        found: Result<String, impl ToString>,
    ) {
        let problem = found.as_ref().err().map(ToString::to_string);
        self.findings.push(Finding { what: what.into(), found: found.ok(), problem, needed });
    }
}

/// What `frit-run doctor` does.
///
/// # Errors
/// A plan that cannot be read or has kernels without code for GPUs, or a measurement that fails.
pub fn doctor(options: &Options) -> Result<Findings, RunError> {
    let plan = options.plan.as_deref().map(plan_dir::read).transpose()?;
    let mut findings = examine(plan.as_ref())?;
    if let Some(size) = options.measure {
        let libraries = Libraries { cublaslt: true, cudnn: false, nvrtc: false };
        let driver = Real::open(0, libraries)?;
        findings.ceilings = Some(ceilings::measure(&driver, size as usize)?);
    }
    Ok(findings)
}

/// Checks this machine, and the requirements of a plan. A plan for the CPU needs only its processor.
///
/// # Errors
/// A plan with kernels that have no code for GPUs.
pub fn examine(plan: Option<&Plan>) -> Result<Findings, RunError> {
    let mut findings = Findings::default();
    let gpu = plan.map(|p| p.target.device == DeviceType::Cuda);
    if let Some(plan) = plan.filter(|_| gpu == Some(false)) {
        let found = plan_dir::check_target(plan).map(|()| plan.target.arch.clone());
        findings.add("processor", Some(true), found);
    }
    let on_gpu = plan.filter(|_| gpu == Some(true));
    let needs = on_gpu.map(needs).transpose()?;
    let need = |of: bool| plan.map(|_| of);
    let machine = Machine::open();
    let version = machine.as_ref().map_or((u32::MAX, 0), |m| m.version);
    match &machine {
        Ok(m) => {
            let found = format!("CUDA {}.{}, {}", m.version.0, m.version.1, m.path);
            findings.add("driver", gpu, Ok::<_, CudaError>(found));
            devices(&mut findings, m, on_gpu, gpu);
        }
        Err(e) => findings.add("driver", gpu, Err(e)),
    }
    if let Some(plan) = on_gpu {
        let bytes = plan.persistent_bytes + plan.workspace_bytes + super::extra_bytes(plan)?;
        findings.memory_bytes = Some(bytes);
        memory(&mut findings, machine.as_ref().ok(), bytes);
    }
    let problems = need(needs.is_some_and(|(libraries, _)| libraries.cublaslt));
    findings.add("cuBLASLt", problems, installed::cublaslt(version));
    let sources = need(needs.is_some_and(|(libraries, _)| libraries.nvrtc));
    findings.add("NVRTC", sources, installed::nvrtc(version));
    // Never needed: without it Frit's own kernels run.
    findings.add("cuDNN", Some(false), installed::cudnn(version));
    let collectives = need(needs.is_some_and(|(_, collectives)| collectives));
    findings.add("NCCL", collectives, installed::nccl());
    Ok(findings)
}

fn devices(findings: &mut Findings, machine: &Machine, plan: Option<&Plan>, gpu: Option<bool>) {
    let n = match machine.n_devices() {
        Ok(0) => return findings.add("GPU", gpu, Err(CudaError::NoDevice { wanted: 0, found: 0 })),
        Ok(n) => n,
        Err(e) => return findings.add("GPU", gpu, Err(e)),
    };
    for i in 0..n {
        let properties = machine.properties(i).and_then(|p| match plan {
            Some(plan) => super::check_architecture(plan, &p).map(|()| p),
            None => Ok(p),
        });
        let found = properties.map(|p| {
            let (major, minor) = p.capability;
            format!("{}, sm_{major}{minor}, {}", p.name, gib(p.memory_bytes))
        });
        findings.add(format!("GPU {i}"), gpu, found);
    }
}

/// The memory of the smallest GPU beside what each rank needs. How much of it is free is known only when a plan is started.
fn memory(findings: &mut Findings, machine: Option<&Machine>, wanted: usize) {
    let devices = machine.map(|m| (m, m.n_devices().unwrap_or(0)));
    let all = devices.into_iter().flat_map(|(m, n)| (0..n).filter_map(|i| m.properties(i).ok()));
    let least = all.map(|p| p.memory_bytes).min();
    let text = format!("{} on each rank's GPU", gib(wanted));
    let found = match least {
        None => Err(format!("the plan needs {text}")),
        Some(total) if total < wanted => Err(format!(
            "the plan needs {text}, which has {}; use a smaller batch (--bind batch), more ranks, \
             memory.budget or memory.offload",
            gib(total)
        )),
        Some(total) => Ok(format!("{text} of {}", gib(total))),
    };
    findings.add("memory", Some(true), found);
}

fn gib(bytes: usize) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_found_or_has_a_problem() {
        let findings = examine(None).unwrap();
        for part in ["driver", "cuBLASLt", "NVRTC", "cuDNN", "NCCL"] {
            assert!(findings.findings.iter().any(|f| f.what == part), "{findings:?}");
        }
        assert!(findings.findings.iter().all(|f| f.found.is_some() != f.problem.is_some()));
        assert!(!findings.lacking(), "without a plan nothing is needed");
    }
}
