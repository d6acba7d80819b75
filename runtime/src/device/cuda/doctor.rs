//! Reports the driver, devices and libraries of this machine, for `frit doctor`.

use super::open::needs;
use crate::RunError;
use frit_cuda::Machine;
use frit_cuda::{CudaError, installed};
use frit_ir::plan::{DeviceType, Plan};
use serde::Serialize;

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

/// All findings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// Driver, devices, libraries.
    pub findings: Vec<Finding>,
    /// Memory that each rank of the plan needs on its device, in bytes.
    pub memory_bytes: Option<usize>,
}

impl Findings {
    /// Whether something that the plan needs is missing.
    pub fn lacking(&self) -> bool {
        self.findings.iter().any(|f| f.needed == Some(true) && f.found.is_none())
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

/// Checks this machine, and the requirements of a plan. A plan for the CPU has none.
///
/// # Errors
/// A plan with kernels that have no code for GPUs.
pub fn examine(plan: Option<&Plan>) -> Result<Findings, RunError> {
    let gpu = plan.map(|p| p.target.device == DeviceType::Cuda);
    let needs = plan.filter(|_| gpu == Some(true)).map(needs).transpose()?;
    let need = |of: bool| plan.map(|_| of);
    let mut findings = Findings::default();
    let machine = Machine::open();
    let version = machine.as_ref().map_or((u32::MAX, 0), |m| m.version);
    match &machine {
        Ok(m) => {
            let found = format!("CUDA {}.{}, {}", m.version.0, m.version.1, m.path);
            findings.add("driver", gpu, Ok::<_, CudaError>(found));
            devices(&mut findings, m, plan.filter(|_| gpu == Some(true)), gpu);
        }
        Err(e) => findings.add("driver", gpu, Err(e)),
    }
    let products = need(needs.is_some_and(|(libraries, _)| libraries.cublaslt));
    findings.add("cuBLASLt", products, installed::cublaslt(version));
    let sources = need(needs.is_some_and(|(libraries, _)| libraries.nvrtc));
    findings.add("NVRTC", sources, installed::nvrtc(version));
    // Never needed: without it Frit's own kernels run.
    findings.add("cuDNN", Some(false), installed::cudnn(version));
    let collectives = need(needs.is_some_and(|(_, collectives)| collectives));
    findings.add("NCCL", collectives, installed::nccl());
    if let Some(plan) = plan.filter(|_| gpu == Some(true)) {
        let extra_bytes = super::extra_bytes(plan)?;
        findings.memory_bytes = Some(plan.persistent_bytes + plan.workspace_bytes + extra_bytes);
    }
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
            let gib = p.memory_bytes as f64 / f64::from(1 << 30);
            format!("{}, sm_{major}{minor}, {gib:.1} GiB", p.name)
        });
        findings.add(format!("GPU {i}"), gpu, found);
    }
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
