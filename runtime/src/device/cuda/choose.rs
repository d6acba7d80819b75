//! Selects the algorithm of every GEMM and the candidate of every choice: rank 0 reads them from the tuning file or measures
//! them now.
//!
//! Measurement happens before the plan's memory is allocated, in temporary memory, so that only the workspace of the
//! selected candidates is allocated afterwards.

use super::bench::Bench;
use super::issue::Issuer;
use super::measure::Tuner;
use super::memory::{Memory, STREAMS};
use super::modules::Modules;
use super::program::Program;
use super::survey::Survey;
use super::tuning::Tuning;
use super::{Limits, Ranks, Watch};
use crate::RunError;
use crate::plan_dir::PlanDir;
use frit_cuda::CudaError;
use frit_cuda::driver::{Address, Driver, EventHandle};
use frit_ir::plan::Plan;
use frit_ir::plan::layout::TUNING;

/// An address that stands for memory which there is not, aligned as all memory.
const NOWHERE: Address = 1 << 40;
/// What the driver and the libraries may still take: one part in so many of the device's memory.
const RESERVE: usize = 32;

/// The selection, equal on every rank.
pub(super) struct Choice {
    tuning: Tuning,
    /// Workspace of the selected engines, in bytes, by stream.
    pub(super) engines_bytes: [usize; STREAMS],
    /// What people should know of it.
    pub(super) note: Option<String>,
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
        (ranks, limits): (&Ranks, &Limits),
    ) -> Result<Choice, RunError> {
        let (plan, path) = (&dir.plan, dir.path.join(TUNING));
        let first = ranks.rank == 0;
        let layout = Memory::layout(plan, &[0; STREAMS], survey.faulting.len());
        let engine_bytes = engine_bytes(driver, &layout, ranks, limits)?;
        let mut tuning = if first { Tuning::read(&path) } else { Tuning::default() };
        let bind = |base| Program::of_choices(plan, survey, driver, modules, engine_bytes, base);
        let (mut program, end) = bind(NOWHERE)?;
        if first && plan.reproducible.is_some() {
            pinned(&tuning, driver, &program)?;
        }
        let measures = first && !tuning.is_complete(driver, &program);
        if measures {
            let base = allocate(driver, (end - NOWHERE) as usize, (plan, &layout), issuer)?;
            (program, _) = bind(base)?;
            let watch = Watch { driver, ranks };
            let wait = |event: EventHandle| watch.wait(event, || "the choice of algorithms".into());
            let bench = Bench::new(driver, issuer.compute(), wait)?;
            let mut tuner = Tuner::new(bench, &mut tuning, &path, limits.tuning(plan));
            tuner.problems(&program)?;
            let algorithms = tuner.prepare(&program, issuer)?;
            tuner.choices(&program, issuer, &algorithms)?;
            driver.free(base)?;
        }
        tuning = shared(tuning, ranks)?;
        let note = note(&tuning, driver, &program, (plan, limits)).filter(|_| first);
        let bytes = settle(&tuning, driver, &mut program, issuer)?;
        let mut engines_bytes = [0; STREAMS];
        for (task, commands) in plan.tasks.iter().zip(&program.commands) {
            let most = &mut engines_bytes[task.stream.index()];
            let needed = commands.iter().filter_map(|c| c.operation()).map(|i| bytes[i]);
            *most = needed.max().unwrap_or(0).max(*most);
        }
        Ok(Choice { tuning, engines_bytes, note })
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
        settle(&self.tuning, driver, program, issuer).map(|_| ())
    }
}

/// Workspace that an engine may use on every rank, in bytes: what the plan leaves of the memory there is.
fn engine_bytes(
    driver: &impl Driver,
    layout: &Memory,
    ranks: &Ranks,
    limits: &Limits,
) -> Result<usize, RunError> {
    let (free, total) = driver.memory()?;
    let taken = layout.bytes.saturating_add(limits.reserved_bytes).saturating_add(total / RESERVE);
    let left = if driver.has_engines() { free.saturating_sub(taken) } else { 0 };
    let Some(rendezvous) = &ranks.rendezvous else { return Ok(left) };
    // The least of all.
    let most_lacking = rendezvous.largest(u64::MAX - left as u64)?;
    Ok((u64::MAX - most_lacking) as usize)
}

/// Memory for the largest of the tasks that are measured, zero at first. If there is too little for the plan itself,
/// that is what the error says.
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

/// Prepares what was chosen; returns the workspace that each operation needs, in bytes.
fn settle(
    tuning: &Tuning,
    driver: &impl Driver,
    program: &mut Program,
    issuer: &mut Issuer,
) -> Result<Vec<usize>, CudaError> {
    let problems = tuning.prepare_problems(driver, program)?;
    issuer.problems = problems.into_iter().map(Option::unwrap_or_default).collect();
    let settled = tuning.prepare_choices(driver, program)?;
    issuer.operations = vec![Default::default(); program.n_operations()];
    let mut bytes = vec![0; program.n_operations()];
    for (choice, settled) in program.choices.iter().zip(&settled) {
        if let (Some(o), Some(engine)) = (choice.operation_of(settled.candidate), settled.engine) {
            (issuer.operations[o.number], bytes[o.number]) = engine;
        }
    }
    program.settle(&settled);
    Ok(bytes)
}

/// Checks that every choice in the file can be made here: another in its place would give other bits.
fn pinned(tuning: &Tuning, driver: &impl Driver, program: &Program) -> Result<(), RunError> {
    let Some((key, e)) = tuning.first_unusable(driver, program) else { return Ok(()) };
    let reason = format!(
        "what it has for `{key}` cannot be made ready ({e}), and in its place another kernel would compute other bits; \
         free memory of the device, or delete the entry from the file of every plan of this run"
    );
    Err(RunError::Plan { path: TUNING.into(), reason })
}

/// Says that the time for measuring was over before all candidates were measured.
fn note(
    tuning: &Tuning,
    driver: &impl Driver,
    program: &Program,
    (plan, limits): (&Plan, &Limits),
) -> Option<String> {
    let (n, all) = (tuning.n_hurried(driver, program), program.n_chosen());
    let seconds = limits.tuning(plan).as_secs();
    if n > 0 && plan.reproducible.is_some() && limits.tuning.is_none() {
        return Some(format!(
            "{n} of {all} choices of kernels are the libraries' first ones, without measuring, so that every number of \
             ranks makes the same; docs/reproducible.md says how to measure them once for all"
        ));
    }
    (n > 0).then(|| {
        format!(
            "{n} of {all} choices of kernels were made before all of their candidates were measured, because the time \
             for measuring was over; they are kept in {TUNING}: to measure all, delete it and start with a greater \
             --tuning-seconds than {seconds}"
        )
    })
}

/// Rank 0's tuning.
fn shared(tuning: Tuning, ranks: &Ranks) -> Result<Tuning, RunError> {
    let Some(rendezvous) = &ranks.rendezvous else { return Ok(tuning) };
    let text = rendezvous.share(tuning.text())?;
    Ok(Tuning::parse(&text).unwrap_or_default())
}
