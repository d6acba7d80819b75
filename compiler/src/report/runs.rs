//! Reads the files of `frit run --metrics`: curves of runs over their steps.
//!
//! A file may end in an incomplete line, because its run was killed, and may have the lines of several runs. A run that resumed
//! continues the curve of the one before it: of steps that both have, its lines count. A run that begins anew has a curve of its own.

use frit_ir::{Code, Diagnostic, counted};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A number of every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Series {
    Loss,
    Lr,
    GradNorm,
    LossScale,
    Rate,
    StepSeconds,
    Memory,
}

impl Series {
    pub(super) const ALL: [Series; 7] = [
        Series::Loss,
        Series::Lr,
        Series::GradNorm,
        Series::LossScale,
        Series::Rate,
        Series::StepSeconds,
        Series::Memory,
    ];

    /// Its key in a line.
    fn key(self) -> &'static str {
        match self {
            Series::Loss => "loss",
            Series::Lr => "lr",
            Series::GradNorm => "grad_norm",
            Series::LossScale => "loss_scale",
            Series::Rate => "tokens_or_examples_per_s",
            Series::StepSeconds => "step_seconds",
            Series::Memory => "memory_bytes",
        }
    }
}

/// A curve: steps, ascending, and a finite number of each.
pub(super) type Curve = Vec<(usize, f64)>;

/// A run, or several that continue each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// Its name in legends.
    pub(super) label: String,
    /// What its last lines name its plan by; absent in files of earlier versions.
    pub(super) plan: Option<String>,
    /// Lines of steps.
    steps: BTreeMap<usize, Step>,
    /// Validations by step: the loss, and metrics by name.
    validations: BTreeMap<usize, BTreeMap<String, f64>>,
    /// The steps with which runs resumed.
    pub(super) resumed: Vec<usize>,
    /// What is unusual about its lines.
    pub(super) notes: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Step {
    /// In the order of [`Series::ALL`]; NaN is null in JSON.
    values: [Option<f64>; Series::ALL.len()],
    skipped: bool,
}

/// The key of the validation loss, in lines and in [`Run::validation`].
pub(super) const VALIDATION_LOSS: &str = "validation_loss";

impl Run {
    pub(super) fn curve(&self, series: Series) -> Curve {
        let value = |(step, s): (&usize, &Step)| Some((*step, s.values[series as usize]?));
        self.steps.iter().filter_map(value).collect()
    }

    /// The curve of a loss or metric of validations.
    pub(super) fn validation(&self, name: &str) -> Curve {
        let value = |(step, v): (&usize, &BTreeMap<String, f64>)| Some((*step, *v.get(name)?));
        self.validations.iter().filter_map(value).collect()
    }

    /// The names of its validation metrics.
    pub(super) fn validation_metrics(&self) -> impl Iterator<Item = &str> {
        let names = self.validations.values().flat_map(|v| v.keys().map(String::as_str));
        names.filter(|name| *name != VALIDATION_LOSS)
    }

    /// Steps whose update was skipped.
    pub(super) fn skipped(&self) -> impl Iterator<Item = usize> {
        self.steps.iter().filter(|(_, s)| s.skipped).map(|(step, _)| *step)
    }

    /// The number of steps.
    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    /// The first step.
    pub(super) fn first(&self) -> Option<usize> {
        self.steps.first_key_value().map(|(step, _)| *step)
    }

    /// The last step.
    pub(super) fn last(&self) -> Option<usize> {
        self.steps.last_key_value().map(|(step, _)| *step)
    }

    /// The median of a series.
    pub(super) fn median(&self, series: Series) -> Option<f64> {
        let mut values: Vec<f64> = self.curve(series).into_iter().map(|(_, v)| v).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }

    fn add(&mut self, step: usize, line: &Value) {
        if line.get(VALIDATION_LOSS).is_some() {
            let validation = self.validations.entry(step).or_default();
            let loss = line[VALIDATION_LOSS].as_f64();
            validation.extend(loss.map(|loss| (VALIDATION_LOSS.to_string(), loss)));
            for key in ["validation_losses", "validation_metrics"] {
                let all = line[key].as_object().into_iter().flatten();
                validation.extend(all.filter_map(|(name, v)| Some((name.clone(), v.as_f64()?))));
            }
            return;
        }
        let values = Series::ALL.map(|series| line[series.key()].as_f64());
        self.steps.insert(step, Step { values, skipped: line["skipped"] == true });
    }

    /// Forgets steps from this one on, which a run that resumed repeats.
    fn resume(&mut self, step: usize) {
        self.steps.split_off(&step);
        self.validations.split_off(&step);
        self.resumed.push(step);
    }
}

/// Reads files of metrics.
///
/// # Errors
/// A file that cannot be read, or has lines of which none is of metrics.
pub fn read(paths: &[PathBuf]) -> Result<Vec<Run>, Diagnostic> {
    let labels = labels(paths);
    let mut runs = Vec::new();
    for (path, label) in paths.iter().zip(&labels) {
        let bytes = std::fs::read(path).map_err(|e| {
            let message = format!("cannot read the metrics {}: {e}", path.display());
            Diagnostic::error(Code::ReportInput, message)
        })?;
        let text = String::from_utf8_lossy(&bytes);
        runs.extend(parse(&text, label).map_err(|why| {
            let message = format!("{} holds no metrics: {why}", path.display());
            Diagnostic::error(Code::ReportInput, message)
                .help("give a file that `frit run --metrics FILE.jsonl` wrote")
        })?);
    }
    Ok(runs)
}

/// The runs of a file.
///
/// # Errors
/// Why no line is of metrics, if there are lines.
fn parse(text: &str, label: &str) -> Result<Vec<Run>, String> {
    let mut runs: Vec<Run> = vec![];
    let mut identity = None;
    let (mut bad, mut first_bad) = (0, None);
    let complete = text.ends_with('\n');
    let n_lines = text.lines().count();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let parsed: Option<(usize, Value)> = serde_json::from_str(line).ok().and_then(step_of);
        let Some((step, line)) = parsed else {
            if i + 1 < n_lines || complete {
                bad += 1;
            }
            first_bad.get_or_insert(i + 1);
            continue;
        };
        if runs.is_empty() || line["run"] != identity.clone().unwrap_or_default() {
            identity = Some(line["run"].clone());
            let plan = line["plan"].as_str().map(str::to_string);
            match runs.last_mut().filter(|run| step > 0 && run.len() > 0) {
                Some(run) => {
                    run.resume(step);
                    run.plan = plan;
                }
                None => runs.push(Run { plan, ..Run::default() }),
            }
        }
        let run = runs.last_mut().expect("invariant: there is a run");
        run.add(step, &line);
    }
    if let (true, Some(line)) = (runs.is_empty(), first_bad) {
        return Err(format!("line {line} is not a JSON object with `step` and `loss`"));
    }
    if runs.is_empty() {
        runs.push(Run { notes: vec!["the file has no lines yet".into()], ..Run::default() });
    }
    let several = runs.len() > 1;
    for (i, run) in runs.iter_mut().enumerate() {
        run.label = if several { format!("{label} ({})", i + 1) } else { label.into() };
    }
    let last = runs.last_mut().expect("invariant: there is a run");
    if !complete && first_bad == Some(n_lines) {
        last.notes.push("the last line is incomplete: the run was killed, or still runs".into());
    }
    if let (1.., Some(line)) = (bad, first_bad) {
        let lines = counted(bad, "line");
        last.notes.push(format!("{lines}, the first of them line {line}, cannot be read"));
    }
    Ok(runs)
}

/// A line of metrics, and its step.
fn step_of(line: Value) -> Option<(usize, Value)> {
    let step = usize::try_from(line.get("step")?.as_u64()?).ok()?;
    let is_metrics = line.get("loss").or(line.get(VALIDATION_LOSS)).is_some();
    is_metrics.then_some((step, line))
}

/// Names of files for legends: their paths without the components that all have in common, and without `.jsonl`.
fn labels(paths: &[PathBuf]) -> Vec<String> {
    let parts = |path: &Path| -> Vec<String> {
        let whole = path.with_extension("");
        whole.components().map(|c| c.as_os_str().to_string_lossy().into_owned()).collect()
    };
    let all: Vec<Vec<String>> = paths.iter().map(|path| parts(path)).collect();
    let shortest = all.iter().map(Vec::len).min().unwrap_or(0);
    let (Some(first), false) = (all.first(), all.windows(2).all(|w| w[0] == w[1])) else {
        let name = |parts: &Vec<String>| parts.last().cloned().unwrap_or_default();
        return all.iter().map(name).collect();
    };
    let same_head = |n: &usize| all.iter().all(|p| p[*n] == first[*n]);
    let head = (0..shortest).take_while(same_head).count();
    let end = |p: &Vec<String>, n: usize| p[p.len() - 1 - n].clone();
    let same_tail = |n: &usize| all.iter().all(|p| end(p, *n) == end(first, *n));
    let tail = (0..shortest - head).take_while(same_tail).count();
    let part = |p: &Vec<String>| match p[head..p.len() - tail].join("/") {
        part if part.is_empty() => p.last().cloned().unwrap_or_default(),
        part => part,
    };
    all.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(run: &str, step: usize, loss: f64) -> String {
        format!("{{\"step\":{step},\"loss\":{loss},\"skipped\":false,\"run\":\"{run}\"}}\n")
    }

    fn losses(run: &Run) -> Vec<(usize, f64)> {
        run.curve(Series::Loss)
    }

    #[test]
    fn a_run_that_resumed_continues_the_curve() {
        let text = line("a", 0, 3.0) + &line("a", 1, 2.0) + &line("a", 2, 9.0) + &line("b", 2, 1.0);
        let runs = parse(&text, "x").expect("runs");
        assert_eq!(runs.len(), 1);
        assert_eq!(losses(&runs[0]), [(0, 3.0), (1, 2.0), (2, 1.0)]);
        assert_eq!(runs[0].resumed, [2]);
    }

    #[test]
    fn a_run_that_begins_anew_has_its_own_curve() {
        let text = line("a", 0, 3.0) + &line("a", 1, 2.0) + &line("b", 0, 4.0);
        let runs = parse(&text, "x").expect("runs");
        assert_eq!(runs.iter().map(|r| r.label.as_str()).collect::<Vec<_>>(), ["x (1)", "x (2)"]);
        assert_eq!(losses(&runs[1]), [(0, 4.0)]);
    }

    #[test]
    fn torn_and_foreign_lines_are_noted() {
        let whole = line("a", 0, 3.0) + &line("a", 1, 2.0);
        let runs = parse(&format!("{whole}{{\"step\":2,\"lo"), "x").expect("runs");
        assert_eq!(losses(&runs[0]).len(), 2);
        assert!(runs[0].notes[0].contains("incomplete"), "{:?}", runs[0].notes);
        let runs = parse(&format!("{whole}oh\n{}", line("a", 2, 1.0)), "x").expect("runs");
        assert_eq!(losses(&runs[0]).len(), 3);
        assert!(runs[0].notes[0].contains("line 3"), "{:?}", runs[0].notes);
        let runs = parse("", "x").expect("no lines");
        assert!(runs[0].notes[0].contains("no lines"), "{:?}", runs[0].notes);
        for foreign in ["hello\n", "{\"a\":1}\n", "[1]\n", "{\"step\":-1,\"loss\":1}\n"] {
            assert!(parse(foreign, "x").expect_err(foreign).contains("line 1"));
        }
    }

    #[test]
    fn losses_that_are_not_finite_are_gaps() {
        let text = line("a", 0, 3.0) + "{\"step\":1,\"loss\":null,\"skipped\":true}\n";
        let runs = parse(&text, "x").expect("runs");
        assert_eq!(losses(&runs[0]), [(0, 3.0)]);
        assert_eq!(runs[0].skipped().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn legends_name_what_differs() {
        let of = |paths: &[&str]| {
            labels(&paths.iter().map(PathBuf::from).collect::<Vec<_>>()).join(", ")
        };
        assert_eq!(of(&["runs/a/metrics.jsonl", "runs/b/metrics.jsonl"]), "a, b");
        assert_eq!(of(&["a.jsonl", "b.jsonl"]), "a, b");
        assert_eq!(of(&["out/metrics.jsonl"]), "metrics");
        assert_eq!(of(&["x/metrics.jsonl", "metrics.jsonl"]), "x, metrics");
        assert_eq!(of(&["a.jsonl", "a.jsonl"]), "a, a");
    }
}
