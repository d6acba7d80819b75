//! Measures the algorithms of each GEMM, and the cuDNN engines of each operation against Frit's own kernels, on this
//! GPU. Results are stored in `tuning.json` beside the plan, keyed by GPU and libraries. Rank 0 selects for all ranks.

use super::command::Command;
use super::issue::Issuer;
use super::program::{EpilogueChoice, OperationChoice, Program};
use crate::RunError;
use frit_cuda::CudaError;
use frit_cuda::Product;
use frit_cuda::cudnn::Engine;
use frit_cuda::driver::{
    Algorithm, Driver, EventHandle, OperationHandle, ProductAddresses, ProductHandle, StreamHandle,
};
use frit_ir::plan::{CandidateName, Operation};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Runs per algorithm, of which the fastest counts.
const RUNS: usize = 5;

/// The content of `tuning.json`: measurements by GPU and library versions, then by GEMM and operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Tuning(BTreeMap<String, BTreeMap<String, Measured>>);

/// The measured candidates, and the selected one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Measured {
    /// `None` where Frit's own kernels are faster, or no algorithm has the epilogue.
    chosen: Option<Choice>,
    /// Every measured candidate.
    candidates: Vec<Timed>,
}

/// A candidate and its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Timed {
    candidate: CandidateName,
    /// The library's algorithm or engine; `None` for Frit's own kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    with: Option<Choice>,
    /// Microseconds; `None` if it failed.
    us: Option<f64>,
}

/// An algorithm or engine of a library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Choice {
    Algorithm(Algorithm),
    Engine(Engine),
}

/// Context of measurements.
pub(super) struct Bench<'a, D, W> {
    driver: &'a D,
    /// The stream on which everything runs.
    on: StreamHandle,
    events: [EventHandle; 2],
    /// Makes the host wait for an event.
    wait: W,
}

impl<'a, D: Driver, W: Fn(EventHandle) -> Result<(), RunError>> Bench<'a, D, W> {
    /// Prepares measurements on a stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn new(driver: &'a D, on: StreamHandle, wait: W) -> Result<Self, CudaError> {
        let events = [driver.create_event(true)?, driver.create_event(true)?];
        Ok(Bench { driver, on, events, wait })
    }

    /// Microseconds of the fastest of several runs after a warm-up run. The inner error is that of enqueuing the run
    /// itself.
    fn time(
        &self,
        run: impl Fn() -> Result<(), CudaError>,
    ) -> Result<Result<f64, CudaError>, RunError> {
        let [begin, end] = self.events;
        let mut least = f64::INFINITY;
        for i in 0..=RUNS {
            self.driver.record(begin, self.on)?;
            if let Err(e) = run() {
                return Ok(Err(e));
            }
            self.driver.record(end, self.on)?;
            (self.wait)(end)?;
            if i > 0 {
                least = least.min(self.driver.elapsed_us(begin, end)?);
            }
        }
        Ok(Ok(least))
    }

    /// The same for commands launched from a CUDA graph, as in a step.
    fn time_captured(
        &self,
        issuer: &Issuer,
        commands: &[Command],
    ) -> Result<Result<f64, CudaError>, RunError> {
        let driver = self.driver;
        let issue = || commands.iter().try_for_each(|c| issuer.command(driver, c, self.on));
        // Libraries initialize in a first run, which cannot be captured.
        if let Err(e) = issue() {
            return Ok(Err(e));
        }
        driver.begin_capture(self.on)?;
        let issued = issue();
        // A capture must be ended even if it failed.
        let captured = driver.end_capture(self.on);
        let graph = match issued.and(captured) {
            Ok(graph) => graph,
            Err(e) => return Ok(Err(e)),
        };
        let time = self.time(|| driver.launch_graph(graph, self.on));
        driver.destroy_graph(graph)?;
        time
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

    /// The text of the file, with a line for each GEMM and operation.
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

    /// The selection on this device; `None` if nothing was measured.
    fn get(&self, device: &str, key: &str) -> Option<&Option<Choice>> {
        Some(&self.0.get(device)?.get(key)?.chosen)
    }

    fn set(&mut self, device: &str, key: String, chosen: Option<Choice>, candidates: Vec<Timed>) {
        let measured = Measured { chosen, candidates };
        self.0.entry(device.into()).or_default().insert(key, measured);
    }

    /// Whether the choice for every GEMM and operation is known and can still be prepared.
    pub(super) fn is_complete(&self, driver: &impl Driver, program: &Program) -> bool {
        let device = device(driver);
        let key = |i: usize| program.products[i].0.to_string();
        (0..program.products.len()).all(|i| self.get(&device, &key(i)).is_some())
            && program.epilogues.iter().all(|e| self.is_compared(&device, &key(e.product)))
            && program.operations.iter().all(|o| self.knows(driver, &device, &o.operation))
    }

    /// Whether a GEMM with an epilogue was compared with its fallback, or has no algorithm.
    fn is_compared(&self, device: &str, key: &str) -> bool {
        let measured = self.0.get(device).and_then(|all| all.get(key));
        measured.is_some_and(|m| {
            let by_frit = |t: &Timed| t.candidate == CandidateName::Frit;
            m.chosen.is_none() || m.candidates.iter().any(by_frit)
        })
    }

    /// Whether an operation's choice is known and can still be prepared.
    fn knows(&self, driver: &impl Driver, device: &str, operation: &Operation) -> bool {
        self.get(device, &operation.to_string()).is_some_and(|choice| match choice {
            Some(Choice::Engine(engine)) => {
                driver.plan(operation, engine, operation.workspace_bytes()).is_ok()
            }
            _ => true,
        })
    }

    /// Measures the GEMMs whose algorithm is not known, on the addresses of their first task; algorithms that fail are
    /// skipped. Returns whether there were any.
    ///
    /// # Errors
    /// A GEMM that no algorithm computes, or a failed call.
    pub(super) fn measure_products<D: Driver, W: Fn(EventHandle) -> Result<(), RunError>>(
        &mut self,
        bench: &Bench<'_, D, W>,
        products: &[(Product, ProductAddresses)],
    ) -> Result<bool, RunError> {
        let (driver, device) = (bench.driver, device(bench.driver));
        let mut changed = false;
        for (product, at) in products {
            if self.get(&device, &product.to_string()).is_some() {
                continue;
            }
            let algorithms = match driver.algorithms(product, at.workspace.1) {
                Err(CudaError::NoAlgorithm { .. }) if product.epilogue.is_optional() => vec![],
                algorithms => algorithms?,
            };
            let (mut best, mut failure, mut candidates) = (None, None, Vec::new());
            for algorithm in algorithms {
                let time = match driver.prepare(product, &algorithm) {
                    // SAFETY: the addresses are those of a task of the plan, which is not running.
                    Ok(ready) => bench.time(|| unsafe { driver.multiply(ready, *at, bench.on) })?,
                    Err(e) => Err(e),
                };
                candidates.push(Timed {
                    candidate: CandidateName::Cublaslt,
                    with: Some(Choice::Algorithm(algorithm)),
                    us: time.as_ref().ok().copied(),
                });
                match time {
                    Ok(us) if best.is_none_or(|(least, _)| us < least) => {
                        best = Some((us, algorithm));
                    }
                    Ok(_) => {}
                    Err(e) => failure = Some(e),
                }
            }
            let algorithm = best.map(|(_, algorithm)| Choice::Algorithm(algorithm));
            if algorithm.is_none() && !product.epilogue.is_optional() {
                let library = driver.properties().libraries.clone();
                let detail = failure.map_or_else(String::new, |e| format!(" ({e})"));
                let product = format!("{product}{detail}");
                return Err(CudaError::NoAlgorithm { library, product }.into());
            }
            self.set(&device, product.to_string(), algorithm, candidates);
            changed = true;
        }
        Ok(changed)
    }

    /// Compares GEMMs with an epilogue with their fallbacks, in CUDA graphs as in a step, where that was not done. The
    /// GEMMs are prepared with their selected algorithms. Returns whether there were any.
    ///
    /// # Errors
    /// A call that failed.
    pub(super) fn measure_epilogues<D: Driver, W: Fn(EventHandle) -> Result<(), RunError>>(
        &mut self,
        bench: &Bench<'_, D, W>,
        issuer: &Issuer,
        products: &[(Product, ProductAddresses)],
        epilogues: &[EpilogueChoice],
    ) -> Result<bool, RunError> {
        let device = device(bench.driver);
        let mut changed = false;
        for EpilogueChoice { product, fallback } in epilogues {
            let (key, at) = (products[*product].0.to_string(), products[*product].1);
            if self.is_compared(&device, &key) {
                continue;
            }
            let multiply = Command::Multiply { product: *product, at };
            let with = bench.time_captured(issuer, &[multiply])??;
            let without = bench.time_captured(issuer, fallback)??;
            let known = self.0.get_mut(&device).and_then(|all| all.get_mut(&key));
            let measured = known.expect("invariant: every product was measured");
            for timed in &mut measured.candidates {
                if timed.with == measured.chosen {
                    timed.us = Some(with);
                }
            }
            let candidate = CandidateName::Frit;
            measured.candidates.push(Timed { candidate, with: None, us: Some(without) });
            if without < with {
                measured.chosen = None;
            }
            changed = true;
        }
        Ok(changed)
    }

    /// Prepares every GEMM that has an algorithm with it.
    ///
    /// # Errors
    /// A GEMM that was not measured, or that the library refuses.
    pub(super) fn prepare_products(
        &self,
        driver: &impl Driver,
        products: &[(Product, ProductAddresses)],
    ) -> Result<Vec<Option<ProductHandle>>, CudaError> {
        let device = device(driver);
        let prepare = |(product, _): &(Product, ProductAddresses)| match self
            .get(&device, &product.to_string())
        {
            Some(Some(Choice::Algorithm(algorithm))) => {
                driver.prepare(product, algorithm).map(Some)
            }
            Some(None) => Ok(None),
            _ => Err(unknown(&device, product)),
        };
        products.iter().map(prepare).collect()
    }

    /// Measures the operations whose choice is not known, or can no longer be prepared: every engine and Frit's own
    /// kernels, on the addresses of the first task. Engines that fail are skipped. Returns whether there were any.
    ///
    /// # Errors
    /// If Frit's own kernels fail, or waiting does.
    pub(super) fn measure_operations<D: Driver, W: Fn(EventHandle) -> Result<(), RunError>>(
        &mut self,
        bench: &Bench<'_, D, W>,
        issuer: &mut Issuer,
        operations: &[OperationChoice],
    ) -> Result<bool, RunError> {
        let (driver, device) = (bench.driver, device(bench.driver));
        issuer.operations = vec![OperationHandle::default(); operations.len()];
        let mut changed = false;
        for (i, OperationChoice { operation, candidate, fallback }) in operations.iter().enumerate()
        {
            if self.knows(driver, &device, operation) {
                continue;
            }
            // An operation that the library does not support has no engine.
            let workspace_bytes = operation.workspace_bytes();
            let engines = driver.engines(operation, workspace_bytes).unwrap_or_default();
            let (mut best, mut candidates) = (None, Vec::new());
            if !engines.is_empty() {
                let mut least = bench.time_captured(issuer, fallback)??;
                candidates.push(Timed {
                    candidate: CandidateName::Frit,
                    with: None,
                    us: Some(least),
                });
                for engine in engines {
                    let Ok((ready, _)) = driver.plan(operation, &engine, workspace_bytes) else {
                        continue;
                    };
                    issuer.operations[i] = ready;
                    let time = bench.time_captured(issuer, candidate)?;
                    candidates.push(Timed {
                        candidate: CandidateName::Cudnn,
                        with: Some(Choice::Engine(engine.clone())),
                        us: time.as_ref().ok().copied(),
                    });
                    match time {
                        Ok(us) if us < least => (least, best) = (us, Some(engine)),
                        _ => {}
                    }
                }
            }
            self.set(&device, operation.to_string(), best.map(Choice::Engine), candidates);
            changed = true;
        }
        Ok(changed)
    }

    /// Prepares every operation that has an engine, and returns each with the workspace it needs in bytes.
    ///
    /// # Errors
    /// An operation that was not measured, or that the library refuses.
    pub(super) fn prepare_operations(
        &self,
        driver: &impl Driver,
        operations: &[OperationChoice],
    ) -> Result<Vec<Option<(OperationHandle, usize)>>, CudaError> {
        let device = device(driver);
        let prepare = |OperationChoice { operation, .. }: &OperationChoice| match self
            .get(&device, &operation.to_string())
        {
            Some(Some(Choice::Engine(engine))) => {
                driver.plan(operation, engine, operation.workspace_bytes()).map(Some)
            }
            Some(None) => Ok(None),
            _ => Err(unknown(&device, operation)),
        };
        operations.iter().map(prepare).collect()
    }
}

/// The key of devices and libraries for which a choice is valid.
fn device(driver: &impl Driver) -> String {
    let p = driver.properties();
    format!("{} sm_{}{}, {}", p.name, p.capability.0, p.capability.1, p.libraries)
}

/// The error if rank 0 measured on another device, or with other libraries.
fn unknown(device: &str, what: &impl ToString) -> CudaError {
    CudaError::NoAlgorithm {
        library: format!("rank 0's choice for another device than {device}"),
        product: what.to_string(),
    }
}
