//! Measures the algorithms of each GEMM, and the candidates of each choice, on this GPU and on random operands. Every result is
//! written at once, so that a start that is killed goes on where it was.

use super::bench::Bench;
use super::command::{Command, settle};
use super::issue::Issuer;
use super::program::{ChoiceOf, GemmOf, Program};
use super::random_data::{RandomData, Region};
use super::tuning::{Measured, Settled, Timed, Tuning, With, device};
use crate::RunError;
use frit_cuda::CudaError;
use frit_cuda::driver::{Driver, EventHandle, GemmHandle, OperationHandle};
use frit_ir::plan::CandidateName;
use std::path::Path;
use std::time::Duration;

/// The best few, which are measured again in a graph.
const FINALISTS: usize = 4;

/// Measures what is not known.
pub(super) struct Tuner<'a, D, W> {
    bench: Bench<'a, D, W>,
    device: String,
    tuning: &'a mut Tuning,
    path: &'a Path,
    /// By the driver's clock.
    deadline: Duration,
    data: RandomData,
}

/// A candidate that can be timed.
struct Trial {
    timed: Timed,
    /// The candidate by its number.
    candidate: usize,
    /// Its engine, and the operation that it computes.
    engine: Option<(usize, OperationHandle)>,
}

impl<'a, D: Driver, W: Fn(EventHandle) -> Result<(), RunError>> Tuner<'a, D, W> {
    /// Measures for so long at most; what is being measured then is finished, and what is left is chosen without.
    pub(super) fn new(
        bench: Bench<'a, D, W>,
        tuning: &'a mut Tuning,
        path: &'a Path,
        time: Duration,
    ) -> Self {
        let (device, data) = (device(bench.driver), RandomData::default());
        let deadline = bench.driver.clock().saturating_add(time);
        Tuner { bench, device, tuning, path, deadline, data }
    }

    fn is_late(&self) -> bool {
        self.bench.driver.clock() >= self.deadline
    }

    /// Keeps a result, in the file too.
    fn keep(&mut self, key: String, measured: Measured) {
        self.tuning.set(&self.device, key, measured);
        self.tuning.write(self.path);
    }

    fn fill(&mut self, regions: &[Region]) -> Result<(), RunError> {
        self.data.fill(self.bench.driver, regions, self.bench.on)?;
        self.bench.finish()
    }

    /// Measures the GEMMs whose algorithm is not known, on the addresses of their first task. An algorithm that
    /// fails is passed over.
    ///
    /// # Errors
    /// A GEMM that no algorithm computes, or a call that failed.
    pub(super) fn problems(&mut self, program: &Program) -> Result<(), RunError> {
        for problem in &program.problems {
            if !self.tuning.knows_problem(&self.device, &problem.problem) {
                let measured = self.problem(problem)?;
                self.keep(problem.problem.to_string(), measured);
            }
        }
        Ok(())
    }

    fn problem(&mut self, of: &GemmOf) -> Result<Measured, RunError> {
        let (driver, GemmOf { problem, at, regions }) = (self.bench.driver, of);
        let algorithms = match driver.algorithms(problem, at.workspace.1) {
            Err(CudaError::NoAlgorithm { .. }) if problem.epilogue.is_optional() => vec![],
            algorithms => algorithms?,
        };
        self.fill(regions)?;
        let n = algorithms.len();
        let (mut trials, mut ready) = (Vec::with_capacity(n), Vec::with_capacity(n));
        let (mut best, mut failure) = (f64::INFINITY, None);
        // SAFETY: the addresses are those of a task of the plan, which is not running.
        let multiply = |ready| unsafe { driver.multiply(ready, *at, self.bench.on) };
        for algorithm in algorithms {
            // One is needed in any case.
            if best.is_finite() && self.is_late() {
                break;
            }
            let (handle, time) = match driver.prepare(problem, &algorithm) {
                Ok(handle) => (handle, self.bench.time(|| multiply(handle), best)?),
                Err(e) => (GemmHandle::default(), Err(e)),
            };
            ready.push(handle);
            trials.push(Timed {
                candidate: CandidateName::Cublaslt,
                with: Some(With::Algorithm(algorithm)),
                us: time.as_ref().ok().copied(),
                graph_us: None,
            });
            match time {
                Ok(us) => best = best.min(us),
                Err(e) => failure = Some(e),
            }
        }
        let finalists = finalists(trials.iter());
        if finalists.len() > 1 && !self.is_late() {
            for i in finalists {
                let time = self.bench.time_captured(|| multiply(ready[i]))?;
                trials[i].graph_us = time.ok();
            }
        }
        let chosen = fastest(trials.iter()).map(|i| trials[i].chosen());
        if chosen.is_none() && !problem.epilogue.is_optional() {
            let library = driver.properties().libraries.clone();
            let detail = failure.map_or_else(String::new, |e| format!(" ({e})"));
            let problem = format!("{problem}{detail}");
            return Err(CudaError::NoAlgorithm { library, problem }.into());
        }
        let unmeasured = n - trials.len();
        Ok(Measured { chosen, candidates: trials, unmeasured })
    }

    /// Makes every GEMM that has an algorithm ready with it.
    ///
    /// # Errors
    /// If the library refuses.
    pub(super) fn prepare(
        &self,
        program: &Program,
        issuer: &mut Issuer,
    ) -> Result<Vec<Option<GemmHandle>>, CudaError> {
        let problems = self.tuning.prepare_problems(self.bench.driver, program)?;
        issuer.problems = problems.iter().map(|p| p.unwrap_or_default()).collect();
        Ok(problems)
    }

    /// Measures the candidates of choices that are not made, or whose engine can no longer be made ready: for each
    /// operation every engine. A candidate that fails is passed over. The GEMMs are ready.
    ///
    /// # Errors
    /// A call that failed.
    pub(super) fn choices(
        &mut self,
        program: &Program,
        issuer: &mut Issuer,
        algorithms: &[Option<GemmHandle>],
    ) -> Result<(), RunError> {
        issuer.operations = vec![OperationHandle::default(); program.n_operations()];
        // A choice may be part of a later one.
        let mut made: Vec<Settled> = Vec::with_capacity(program.choices.len());
        for choice in &program.choices {
            if !self.tuning.knows_choice(self.bench.driver, &self.device, choice) {
                let mut candidates = choice.candidates.clone();
                candidates.iter_mut().for_each(|(_, commands)| settle(commands, &made));
                let measured = self.choice(choice, &candidates, issuer, algorithms)?;
                self.keep(choice.key.clone(), measured);
            }
            let settled = self.tuning.settle(self.bench.driver, &self.device, choice)?;
            if let (Some((handle, _)), Some(o)) =
                (settled.engine, choice.operation_of(settled.candidate))
            {
                issuer.operations[o.number] = handle;
            }
            made.push(settled);
        }
        Ok(())
    }

    fn choice(
        &mut self,
        choice: &ChoiceOf,
        candidates: &[(CandidateName, Vec<Command>)],
        issuer: &mut Issuer,
        algorithms: &[Option<GemmHandle>],
    ) -> Result<Measured, RunError> {
        let has_algorithms = |commands: &[Command]| {
            commands.iter().all(|c| c.problem().is_none_or(|p| algorithms[p].is_some()))
        };
        let trial = |candidate: usize, with: Option<With>| {
            let name = candidates[candidate].0;
            let timed = Timed { candidate: name, with, us: None, graph_us: None };
            Trial { timed, candidate, engine: None }
        };
        // What needs no engine to be compiled comes first.
        let mut trials: Vec<Trial> = (0..candidates.len())
            .filter(|c| choice.operation_of(*c).is_none() && has_algorithms(&candidates[*c].1))
            .map(|c| trial(c, None))
            .collect();
        let compiled: Vec<usize> =
            (0..candidates.len()).filter(|c| choice.operation_of(*c).is_some()).collect();
        if self.is_late() {
            let chosen = trials.first().map(|t| t.timed.chosen());
            let unmeasured = trials.len() + compiled.len();
            let unmeasured = if unmeasured > 1 { unmeasured } else { 0 };
            return Ok(Measured { chosen, candidates: vec![], unmeasured });
        }
        let mut engines = Vec::new();
        for c in compiled {
            let o = choice.operation_of(c).expect("invariant: it has an operation");
            // What the library does not support has no engine.
            let found = self.bench.driver.engines(&o.operation, o.workspace_bytes);
            engines.extend(found.unwrap_or_default().into_iter().map(|engine| (c, engine)));
        }
        if trials.len() + engines.len() < 2 {
            let chosen = trials.first().map(|t| t.timed.chosen());
            return Ok(Measured { chosen, candidates: vec![], unmeasured: 0 });
        }
        self.fill(&choice.regions)?;
        let mut best = f64::INFINITY;
        for trial in &mut trials {
            let us = self.time(trial, candidates, issuer, best)??;
            (trial.timed.us, best) = (Some(us), best.min(us));
        }
        let mut left = engines.len();
        for (c, engine) in engines {
            if self.is_late() {
                break;
            }
            left -= 1;
            let o = choice.operation_of(c).expect("invariant: it has an operation");
            let ready = self.bench.driver.plan(&o.operation, &engine, o.workspace_bytes);
            let Ok((ready, _)) = ready else { continue };
            let mut trial = trial(c, Some(With::Engine(engine)));
            trial.engine = Some((o.number, ready));
            trial.timed.us = self.time(&trial, candidates, issuer, best)?.ok();
            best = trial.timed.us.map_or(best, |us| best.min(us));
            trials.push(trial);
        }
        let finalists = finalists(trials.iter().map(|t| &t.timed));
        if finalists.len() > 1 && !self.is_late() {
            for i in finalists {
                let trial = &mut trials[i];
                select(trial, issuer);
                let driver = self.bench.driver;
                let run = || issuer.commands(driver, &candidates[trial.candidate].1, self.bench.on);
                trial.timed.graph_us = self.bench.time_captured(run)?.ok();
            }
        }
        let chosen = fastest(trials.iter().map(|t| &t.timed)).map(|i| trials[i].timed.chosen());
        let candidates = trials.into_iter().map(|t| t.timed).collect();
        Ok(Measured { chosen, candidates, unmeasured: left })
    }

    /// Microseconds of a candidate, enqueued directly.
    fn time(
        &self,
        trial: &Trial,
        candidates: &[(CandidateName, Vec<Command>)],
        issuer: &mut Issuer,
        best: f64,
    ) -> Result<Result<f64, CudaError>, RunError> {
        select(trial, issuer);
        let (driver, on) = (self.bench.driver, self.bench.on);
        self.bench.time(|| issuer.commands(driver, &candidates[trial.candidate].1, on), best)
    }
}

/// Makes the issuer use a candidate's engine.
fn select(trial: &Trial, issuer: &mut Issuer) {
    if let Some((operation, ready)) = trial.engine {
        issuer.operations[operation] = ready;
    }
}

/// The best few, in the order in which they were tried.
fn finalists<'t>(all: impl Iterator<Item = &'t Timed>) -> Vec<usize> {
    let mut timed: Vec<(usize, f64)> =
        all.enumerate().filter_map(|(i, t)| Some((i, t.us?))).collect();
    timed.sort_by(|a, b| a.1.total_cmp(&b.1));
    timed.truncate(FINALISTS);
    let mut places: Vec<usize> = timed.into_iter().map(|(i, _)| i).collect();
    places.sort_unstable();
    places
}

/// The one that takes the least time in a graph, or by itself if none was in one; the first of equals.
fn fastest<'t>(all: impl Iterator<Item = &'t Timed> + Clone) -> Option<usize> {
    let least = |time: fn(&Timed) -> Option<f64>| {
        let timed = all.clone().enumerate().filter_map(|(i, t)| Some((i, time(t)?)));
        timed.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(i, _)| i)
    };
    least(|t| t.graph_us).or_else(|| least(|t| t.us))
}
