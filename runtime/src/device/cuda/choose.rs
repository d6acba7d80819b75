//! Selects the candidate for every GEMM and operation: rank 0 reads it from the tuning file or measures it now.
//!
//! Measurement happens before the plan's memory is allocated, in temporary memory, so that only the workspace of the
//! selected candidates is allocated afterwards.

use super::issue::Issuer;
use super::memory::{Memory, STREAMS};
use super::modules::Modules;
use super::program::Program;
use super::survey::Survey;
use super::tuning::{Bench, Tuning};
use super::{Ranks, Watch};
use crate::RunError;
use crate::plan_dir::PlanDir;
use frit_cuda::CudaError;
use frit_cuda::driver::{Address, Driver, EventHandle};
use frit_ir::plan::Plan;

/// File of the plan directory with the measurements.
const TUNING: &str = "tuning.json";
/// A placeholder address with the alignment of allocations.
const NOWHERE: Address = 1 << 40;

/// The selection, equal on every rank.
pub(super) struct Choice {
    tuning: Tuning,
    /// Workspace of the selected engines, in bytes, by stream.
    pub(super) engines_bytes: [usize; STREAMS],
}

impl Choice {
    /// Reads stored measurements and measures the rest.
    ///
    /// # Errors
    /// If there is no memory for the largest task, or a call fails.
    pub(super) fn make<D: Driver>(
        dir: &PlanDir,
        survey: &Survey<'_>,
        driver: &D,
        modules: &Modules,
        issuer: &mut Issuer,
        ranks: &Ranks,
    ) -> Result<Choice, RunError> {
        let (plan, path) = (&dir.plan, dir.path.join(TUNING));
        let first = ranks.rank == 0;
        let mut tuning = if first { Tuning::read(&path) } else { Tuning::default() };
        let bind = |base| Program::of_choices(plan, survey, driver, modules, base);
        let (mut program, end) = bind(NOWHERE)?;
        let measures = first && !tuning.is_complete(driver, &program);
        let memory = match measures {
            true => {
                let layout = Memory::layout(plan, &[0; STREAMS], survey.faulting.len());
                Some(allocate(driver, (end - NOWHERE) as usize, (plan, &layout), issuer)?)
            }
            false => None,
        };
        if let Some(base) = memory {
            (program, _) = bind(base)?;
        }
        let watch = Watch { driver, ranks };
        let wait = |event: EventHandle| watch.wait(event, || "the choice of algorithms".into());
        let bench = Bench::new(driver, issuer.compute(), wait)?;

        if measures && tuning.measure_products(&bench, &program.products)? {
            tuning.write(&path);
        }
        tuning = shared(tuning, ranks)?;
        settle_products(&tuning, driver, &mut program, issuer)?;
        // The GEMMs of fallbacks are now prepared.
        let (products, epilogues) = (&program.products, &program.epilogues);
        if measures && tuning.measure_epilogues(&bench, issuer, products, epilogues)? {
            tuning.write(&path);
        }
        tuning = shared(tuning, ranks)?;
        (program, _) = bind(memory.unwrap_or(NOWHERE))?;
        settle_products(&tuning, driver, &mut program, issuer)?;
        // Frit's own kernels may be GEMMs, which are also prepared.
        if measures && tuning.measure_operations(&bench, issuer, &program.operations)? {
            tuning.write(&path);
        }
        tuning = shared(tuning, ranks)?;
        if let Some(base) = memory {
            driver.free(base)?;
        }
        let bytes = settle_operations(&tuning, driver, &mut program, issuer)?;
        let mut engines_bytes = [0; STREAMS];
        for (task, commands) in plan.tasks.iter().zip(&program.commands) {
            let most = &mut engines_bytes[task.stream.index()];
            let needed = commands.iter().filter_map(|c| c.operation()).map(|i| bytes[i]);
            *most = needed.max().unwrap_or(0).max(*most);
        }
        Ok(Choice { tuning, engines_bytes })
    }

    /// Applies the selection to a program.
    ///
    /// # Errors
    /// If the library refuses what it accepted before.
    pub(super) fn settle(
        &self,
        driver: &impl Driver,
        program: &mut Program,
        issuer: &mut Issuer,
    ) -> Result<(), CudaError> {
        settle_products(&self.tuning, driver, program, issuer)?;
        settle_operations(&self.tuning, driver, program, issuer).map(|_| ())
    }
}

/// Allocates zeroed memory for the largest of the measured tasks. If there is too little for the plan itself, the error
/// says so.
fn allocate(
    driver: &impl Driver,
    bytes: usize,
    (plan, layout): (&Plan, &Memory),
    issuer: &Issuer,
) -> Result<Address, CudaError> {
    let base = driver.allocate(bytes).map_err(|e| match e {
        CudaError::OutOfMemory { free, total, .. } if layout.bytes > free => {
            layout.lacking(plan, free, total)
        }
        CudaError::OutOfMemory { wanted, free, total, .. } => {
            let detail = "to measure the task that needs most memory".into();
            CudaError::OutOfMemory { wanted, detail, free, total }
        }
        other => other,
    })?;
    driver.zero(base, bytes, issuer.compute())?;
    Ok(base)
}

fn settle_products(
    tuning: &Tuning,
    driver: &impl Driver,
    program: &mut Program,
    issuer: &mut Issuer,
) -> Result<(), CudaError> {
    let products = tuning.prepare_products(driver, &program.products)?;
    program.settle_products(|product| products[product].is_some());
    issuer.products = products.into_iter().map(Option::unwrap_or_default).collect();
    Ok(())
}

/// Returns the workspace that each operation needs, in bytes.
fn settle_operations(
    tuning: &Tuning,
    driver: &impl Driver,
    program: &mut Program,
    issuer: &mut Issuer,
) -> Result<Vec<usize>, CudaError> {
    let operations = tuning.prepare_operations(driver, &program.operations)?;
    program.settle_operations(|operation| operations[operation].is_some());
    let (handles, bytes) = operations.into_iter().map(Option::unwrap_or_default).unzip();
    issuer.operations = handles;
    Ok(bytes)
}

/// Rank 0's tuning.
fn shared(tuning: Tuning, ranks: &Ranks) -> Result<Tuning, RunError> {
    let Some(rendezvous) = &ranks.rendezvous else { return Ok(tuning) };
    let text = rendezvous.share(tuning.text())?;
    Ok(Tuning::parse(&text).unwrap_or_default())
}
