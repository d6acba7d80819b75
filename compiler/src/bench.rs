//! `frit bench`: recompiles the model of a plan in fp32 and runs both plans alternately.

use crate::compilation::compile;
use crate::config::LossScale;
use crate::diagnostics::Report;
use crate::plan_dir::{self, Stored};
use crate::predict;
use crate::repeat::{Repeat, random_data};
use frit_ir::plan::Plan;
use frit_ir::{Code, DType, Diagnostic};
use frit_runtime::run::{RunOptions, RunReport, run};
use std::path::Path;

/// Turns that each plan gets, so that both see the machine at several moments.
const TURNS: usize = 2;

/// Below this speed-up low precision is not worth its roundings.
const OPTIONAL: f64 = 1.1;
/// From this on it is.
const WORTH: f64 = 1.5;

/// One of the two plans.
#[derive(Clone, Debug, Default)]
pub struct Side {
    /// Its autocast dtype.
    pub compute_dtype: String,
    /// Median seconds of a step.
    pub step_seconds: f64,
    /// Arena bytes of one rank.
    pub peak_bytes: usize,
    /// Casts of one step.
    pub casts: usize,
    /// Loss of every step.
    pub losses: Vec<f64>,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Low precision does not pay.
    DontUse,
    /// It pays a little.
    Optional,
    /// It pays.
    Use,
}

impl Verdict {
    /// The verdict for a speed-up.
    pub fn of(speedup: f64) -> Verdict {
        match speedup {
            x if x < OPTIONAL => Verdict::DontUse,
            x if x <= WORTH => Verdict::Optional,
            _ => Verdict::Use,
        }
    }

    /// In a word.
    pub fn word(self) -> &'static str {
        match self {
            Verdict::DontUse => "don't use",
            Verdict::Optional => "optional",
            Verdict::Use => "use",
        }
    }

    /// In a sentence.
    pub fn why(self) -> &'static str {
        match self {
            Verdict::DontUse => "low precision makes this model less than 1.1 times as fast",
            Verdict::Optional => "it is 1.1 to 1.5 times as fast; decide by memory and deviation",
            Verdict::Use => "it is more than 1.5 times as fast",
        }
    }
}

/// The comparison.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The plan that was given.
    pub plan: Side,
    /// The same model in fp32.
    pub fp32: Side,
    /// The speed-up that the cost model predicts.
    pub predicted_speedup: f64,
}

impl Bench {
    /// Runs `steps` steps of both plans, on this data or on random numbers. `model` is where the model is now that the
    /// plan was compiled from.
    ///
    /// # Errors
    /// If the model cannot be found or compiled any more, or a run fails.
    pub fn run(
        dir: &Path,
        model: Option<&Path>,
        data: Option<&Path>,
        steps: usize,
        threads: Option<usize>,
        allow_external_data: bool,
    ) -> Result<Bench, Report> {
        let plan = plan_dir::read(dir)?;
        if !plan.compute_dtype.is_low_precision() {
            let message = format!("{} computes in {} already", dir.display(), plan.compute_dtype);
            return Err(Diagnostic::error(Code::BenchPlan, message)
                .help("give a plan in bf16 or fp16")
                .into());
        }
        let scratch = tempfile::tempdir().map_err(|e| {
            Diagnostic::error(Code::FileUnwritable, format!("no directory for the other plan: {e}"))
        })?;
        let fp32_dir = scratch.path().join("fp32");
        let fp32 = in_fp32(dir, &plan, model, &fp32_dir, allow_external_data)?;
        let data = match data {
            Some(data) => data.to_path_buf(),
            None => random_data(&plan, scratch.path())?,
        };
        // The first step of each turn warms up.
        let options = RunOptions {
            steps: steps + 1,
            data: data.into(),
            threads,
            progress: true,
            ..RunOptions::default()
        };
        let run = |dir: &Path| -> Result<RunReport, Report> {
            run(dir, &options).map_err(|e| Diagnostic::error(Code::RunFailed, e.to_string()).into())
        };
        let mut reports = [vec![], vec![]];
        for _ in 0..TURNS {
            for (of, dir) in reports.iter_mut().zip([dir, &fp32_dir]) {
                of.push(run(dir)?);
            }
        }
        let [of_plan, of_fp32] = reports;
        Ok(Bench {
            predicted_speedup: predict::step(&fp32)?.step_seconds
                / predict::step(&plan)?.step_seconds.max(f64::MIN_POSITIVE),
            plan: Side::of(&plan, &of_plan),
            fp32: Side::of(&fp32, &of_fp32),
        })
    }

    /// How many times as fast as fp32 the plan is.
    pub fn speedup(&self) -> f64 {
        self.fp32.step_seconds / self.plan.step_seconds.max(f64::MIN_POSITIVE)
    }

    /// Its memory over that of fp32.
    pub fn memory_ratio(&self) -> f64 {
        self.plan.peak_bytes as f64 / self.fp32.peak_bytes.max(1) as f64
    }

    /// Mean relative difference of the losses.
    pub fn loss_deviation(&self) -> f64 {
        let pairs = || self.plan.losses.iter().zip(&self.fp32.losses);
        let relative = |(a, b): (&f64, &f64)| (a - b).abs() / b.abs().max(f64::MIN_POSITIVE);
        pairs().map(relative).sum::<f64>() / pairs().count().max(1) as f64
    }

    /// Whether to use the plan's precision.
    pub fn verdict(&self) -> Verdict {
        Verdict::of(self.speedup())
    }
}

impl Side {
    fn of(plan: &Plan, reports: &[RunReport]) -> Side {
        let seconds = reports.iter().flat_map(|r| r.seconds.iter().skip(1).copied()).collect();
        let summary = plan.summary();
        Side {
            compute_dtype: summary.compute_dtype,
            step_seconds: median(seconds),
            peak_bytes: summary.peak_bytes,
            casts: summary.casts,
            losses: reports.first().map(|r| r.losses.clone()).unwrap_or_default(),
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    match n {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        _ => 0.5 * (values[n / 2 - 1] + values[n / 2]),
    }
}

/// Compiles the plan's model in fp32, with everything else as it was.
fn in_fp32(
    dir: &Path,
    plan: &Plan,
    given: Option<&Path>,
    to: &Path,
    allow_external_data: bool,
) -> Result<Plan, Report> {
    let Repeat { mut config, request, .. } = Repeat::of(dir, plan, given, to, allow_external_data)?;
    let precision = &mut config.precision;
    (precision.compute, precision.loss_scale) = (DType::F32, LossScale::None);
    precision.overrides.clear();
    config.sharding.param_dtype = None;
    config.sharding.reduce_dtype = DType::F32;
    let compiled = compile(&request, &config, &mut ())?;
    let compiled =
        compiled.ok_or_else(|| Diagnostic::error(Code::BenchPlan, "no plan was made"))?;
    plan_dir::write(to, &compiled, Stored::Copy)?;
    Ok(compiled.plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_by_speed() {
        assert_eq!(Verdict::of(0.7), Verdict::DontUse);
        assert_eq!(Verdict::of(1.0999), Verdict::DontUse);
        assert_eq!(Verdict::of(1.1), Verdict::Optional);
        assert_eq!(Verdict::of(1.5), Verdict::Optional);
        assert_eq!(Verdict::of(1.51), Verdict::Use);
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(vec![]).is_nan());
    }
}
