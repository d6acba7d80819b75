//! The file `tuning.json` beside a plan: what was chosen for each GEMM and each choice of the plan, and the times that decided it,
//! by GPU and library versions.

use super::program::{ChoiceOf, Program};
use frit_cuda::CudaError;
use frit_cuda::GemmProblem;
use frit_cuda::cudnn::Engine;
use frit_cuda::driver::{Algorithm, Driver, GemmHandle, OperationHandle};
use frit_ir::plan::CandidateName;
use frit_ir::plan::layout::TUNING;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Its content.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Tuning(BTreeMap<String, BTreeMap<String, Measured>>);

/// The measured candidates, and the selected one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    /// None of a GEMM whose epilogue no algorithm has.
    pub(super) chosen: Option<Chosen>,
    /// Every candidate that was tried.
    pub(super) candidates: Vec<Timed>,
    /// Candidates that were not tried, because the time for measuring was over.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) unmeasured: usize,
}

/// A candidate, and with what a library computes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Chosen {
    pub(super) candidate: CandidateName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) with: Option<With>,
}

/// An algorithm or engine of a library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum With {
    Algorithm(Algorithm),
    Engine(Engine),
}

/// A candidate and its times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Timed {
    pub(super) candidate: CandidateName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) with: Option<With>,
    /// Microseconds, enqueued by itself; none if it failed.
    pub(super) us: Option<f64>,
    /// Microseconds in a graph, of the best few.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) graph_us: Option<f64>,
}

/// The times of the candidates of a choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChoiceTimes {
    /// The choice: its candidates, and what libraries compute in them.
    pub choice: String,
    /// The candidate that was chosen.
    pub chosen: String,
    /// Microseconds of the best of each candidate, in a graph where it was measured in one.
    pub us: BTreeMap<String, f64>,
}

/// The choices of a plan directory whose candidates were measured, by GPU and libraries; none if it was never started.
pub fn times(plan: &Path) -> BTreeMap<String, Vec<ChoiceTimes>> {
    let of = |(key, measured): (String, Measured)| {
        let chosen = measured.chosen?.candidate.word().to_string();
        let mut us = BTreeMap::new();
        for timed in &measured.candidates {
            let Some(time) = timed.graph_us.or(timed.us) else { continue };
            let least: &mut f64 = us.entry(timed.candidate.word().to_string()).or_insert(time);
            *least = least.min(time);
        }
        (us.len() > 1).then_some(ChoiceTimes { choice: key, chosen, us })
    };
    let all = Tuning::read(&plan.join(TUNING)).0.into_iter();
    let all = all.map(|(device, all)| (device, all.into_iter().filter_map(of).collect()));
    all.collect()
}

/// What was chosen of a choice, ready to run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Settled {
    /// The candidate by its number.
    pub(super) candidate: usize,
    /// The engine of its operation, and the workspace that it needs in bytes.
    pub(super) engine: Option<(OperationHandle, usize)>,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl Timed {
    /// As it is chosen.
    pub(super) fn chosen(&self) -> Chosen {
        Chosen { candidate: self.candidate, with: self.with.clone() }
    }
}

impl Tuning {
    /// Reads a file; empty if it is missing or invalid.
    pub(super) fn read(path: &Path) -> Tuning {
        let text = std::fs::read(path).unwrap_or_default();
        Tuning::parse(&text).unwrap_or_default()
    }

    /// Parses the text of a file.
    pub(super) fn parse(text: &[u8]) -> Option<Tuning> {
        serde_json::from_slice(text).ok()
    }

    /// Its text, a line for each GEMM and choice.
    pub(super) fn text(&self) -> Vec<u8> {
        let line = |(key, measured): (&String, &Measured)| {
            Some(format!(
                "    {}: {}",
                serde_json::to_string(key).ok()?,
                serde_json::to_string(measured).ok()?
            ))
        };
        let device = |(device, all): (&String, &BTreeMap<String, Measured>)| {
            let lines: Vec<String> = all.iter().filter_map(line).collect();
            Some(format!(
                "  {}: {{\n{}\n  }}",
                serde_json::to_string(device).ok()?,
                lines.join(",\n")
            ))
        };
        let devices: Vec<String> = self.0.iter().filter_map(device).collect();
        format!("{{\n{}\n}}\n", devices.join(",\n")).into_bytes()
    }

    /// Writes a file atomically. Without write access to the plan directory, measurements are repeated by the next run.
    pub(super) fn write(&self, path: &Path) {
        let aside = path.with_extension(format!("partial-{}", std::process::id()));
        let written =
            std::fs::write(&aside, self.text()).and_then(|()| std::fs::rename(&aside, path));
        if written.is_err() {
            let _ = std::fs::remove_file(&aside);
        }
    }

    /// What was measured on this device.
    fn get(&self, device: &str, key: &str) -> Option<&Measured> {
        self.0.get(device)?.get(key)
    }

    /// Keeps what was measured on this device.
    pub(super) fn set(&mut self, device: &str, key: String, measured: Measured) {
        self.0.entry(device.into()).or_default().insert(key, measured);
    }

    /// Whether everything of a program is chosen, and can still be made ready.
    pub(super) fn is_complete(&self, driver: &impl Driver, program: &Program) -> bool {
        let device = device(driver);
        program.problems.iter().all(|p| self.knows_problem(&device, &p.problem))
            && program.choices.iter().all(|c| self.knows_choice(driver, &device, c))
    }

    /// Whether a GEMM's algorithm is known, or that it has none.
    pub(super) fn knows_problem(&self, device: &str, problem: &GemmProblem) -> bool {
        self.get(device, &problem.to_string()).is_some()
    }

    /// Whether a choice is made, and can still be made ready.
    pub(super) fn knows_choice(
        &self,
        driver: &impl Driver,
        device: &str,
        choice: &ChoiceOf,
    ) -> bool {
        self.get(device, &choice.key).is_some() && self.settle(driver, device, choice).is_ok()
    }

    /// The first choice of a program that was made, and cannot be made ready.
    pub(super) fn first_unusable(
        &self,
        driver: &impl Driver,
        program: &Program,
    ) -> Option<(String, CudaError)> {
        let device = device(driver);
        let made = |c: &&ChoiceOf| self.get(&device, &c.key).is_some();
        program.choices.iter().filter(made).find_map(|choice| {
            self.settle(driver, &device, choice).err().map(|e| (choice.key.clone(), e))
        })
    }

    /// Choices of a program that were made before all of their candidates were measured.
    pub(super) fn n_hurried(&self, driver: &impl Driver, program: &Program) -> usize {
        let device = device(driver);
        let keys = program.problems.iter().map(|p| p.problem.to_string());
        let keys = keys.chain(program.choices.iter().map(|c| c.key.clone()));
        keys.filter(|key| self.get(&device, key).is_some_and(|m| m.unmeasured > 0)).count()
    }

    /// Prepares every GEMM that has an algorithm with it.
    ///
    /// # Errors
    /// A GEMM that was not measured, or that the library refuses.
    pub(super) fn prepare_problems(
        &self,
        driver: &impl Driver,
        program: &Program,
    ) -> Result<Vec<Option<GemmHandle>>, CudaError> {
        let device = device(driver);
        let prepare = |problem: &GemmProblem| {
            let measured = self.get(&device, &problem.to_string());
            match measured.map(|m| m.chosen.as_ref().and_then(|c| c.with.as_ref())) {
                Some(Some(With::Algorithm(algorithm))) => {
                    driver.prepare(problem, algorithm).map(Some)
                }
                Some(None) if problem.epilogue.is_optional() => Ok(None),
                _ => Err(unknown(&device, problem)),
            }
        };
        program.problems.iter().map(|p| prepare(&p.problem)).collect()
    }

    /// What was chosen of every choice, ready to run.
    ///
    /// # Errors
    /// A choice that was not made, or an engine that the library refuses.
    pub(super) fn prepare_choices(
        &self,
        driver: &impl Driver,
        program: &Program,
    ) -> Result<Vec<Settled>, CudaError> {
        let device = device(driver);
        program.choices.iter().map(|choice| self.settle(driver, &device, choice)).collect()
    }

    /// What was chosen of a choice, ready to run.
    ///
    /// # Errors
    /// As [`Tuning::prepare_choices`].
    pub(super) fn settle(
        &self,
        driver: &impl Driver,
        device: &str,
        choice: &ChoiceOf,
    ) -> Result<Settled, CudaError> {
        let known = self.get(device, &choice.key).and_then(|m| m.chosen.as_ref());
        let Some(Chosen { candidate, with }) = known else {
            return Err(unknown(device, &choice.key));
        };
        let is_it = |(name, _): &(CandidateName, _)| name == candidate;
        let number = choice.candidates.iter().position(is_it);
        let number = number.ok_or_else(|| unknown(device, &choice.key))?;
        let engine = match (choice.operation_of(number), with) {
            (None, None) => None,
            (Some(o), Some(With::Engine(engine))) => {
                Some(driver.plan(&o.operation, engine, o.workspace_bytes)?)
            }
            _ => return Err(unknown(device, &choice.key)),
        };
        Ok(Settled { candidate: number, engine })
    }
}

/// What a choice is valid for.
pub(super) fn device(driver: &impl Driver) -> String {
    let p = driver.properties();
    format!("{} sm_{}{}, {}", p.name, p.capability.0, p.capability.1, p.libraries)
}

/// The error if rank 0 measured on another device, or with other libraries.
fn unknown(device: &str, what: &impl ToString) -> CudaError {
    CudaError::NoAlgorithm {
        library: format!("rank 0's choice for another device than {device}"),
        problem: what.to_string(),
    }
}
