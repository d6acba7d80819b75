//! Derives a precision policy from measured numerics: `frit inspect --numerics`.
//!
//! The file has, by scope, exponent histograms of activations and gradients. A format suits a scope if it loses at most one percent
//! of the non-zero numbers.

use frit_ir::{Code, Diagnostic};
use frit_runtime::numerics::{FORMAT, Format, Kind, NumericsFile, Row};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// The part of the numbers of a scope that a format may lose.
const LOST: f64 = 0.01;

/// Powers of two between the largest gradient and the maximum of f16: gradients of later steps and
/// other data are larger.
const HEADROOM: i32 = 3;

/// The largest loss scale that is recommended, as an exponent: PyTorch's dynamic scale starts at 2¹⁶ and
/// grows from there.
const LARGEST_SCALE: i32 = 24;

/// The recommendation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Policy {
    /// For `precision.compute`.
    pub compute: String,
    /// The first loss scale with which f16 would hold the gradients.
    pub fp16_init_scale: f64,
    /// Whether f16 would hold everything with that scale, but for `fp16_islands`.
    pub fp16_fits: bool,
    /// Scopes that f16 does not hold.
    pub fp16_islands: Vec<String>,
    /// Scopes that the recommended dtype does not hold: to be computed in fp32.
    pub islands: Vec<String>,
    /// Scopes whose numbers fit fp8 (e4m3 forward, e5m2 gradients) with a scale per tensor.
    pub fp8_scopes: Vec<String>,
    /// Why.
    pub reasons: Vec<String>,
}

/// Reads the file.
///
/// # Errors
/// If it cannot be read, or is none of this version.
pub fn read(path: &Path) -> Result<NumericsFile, Diagnostic> {
    let refuse = |e: String| {
        Diagnostic::error(Code::NumericsFile, format!("{}: {e}", path.display()))
            .help("give a file that `frit run --numerics` wrote")
    };
    let text = std::fs::read_to_string(path).map_err(|e| refuse(e.to_string()))?;
    let file: NumericsFile = serde_json::from_str(&text).map_err(|e| refuse(e.to_string()))?;
    if file.frit_numerics != FORMAT {
        return Err(refuse(format!("version {} is not {FORMAT}", file.frit_numerics)));
    }
    Ok(file)
}

fn top(row: &Row) -> Option<i32> {
    row.histogram.exponents.keys().next_back().copied()
}

/// The part that a format does not hold.
fn lost(row: &Row, format: &Format, shift: i32) -> f64 {
    row.histogram.underflow(format, shift) + row.histogram.overflow(format, shift)
}

impl Policy {
    /// The policy for what was measured.
    pub fn of(file: &NumericsFile) -> Policy {
        let [f16, bf16, e4m3, e5m2] = &Format::ALL;
        let gradients = || file.scopes.iter().filter(|r| r.kind == Kind::Gradient);
        let largest = gradients().filter_map(top).max();
        let shift = largest.map_or(0, |e| (f16.top - HEADROOM - e).clamp(0, LARGEST_SCALE));
        let scaled = |row: &Row| if row.kind == Kind::Gradient { shift } else { 0 };
        let misfits = |format: &Format, scale: &dyn Fn(&Row) -> i32| -> Vec<String> {
            let rows = file.scopes.iter();
            let misfit = rows.filter(|r| {
                lost(r, format, scale(r)) > LOST || r.histogram.overflow(format, scale(r)) > 0.0
            });
            names(misfit)
        };
        let fp16_islands = misfits(f16, &scaled);
        let not_finite = names(file.scopes.iter().filter(|r| r.histogram.not_finite > 0));
        let (compute, islands) =
            if not_finite.is_empty() { ("bf16", misfits(bf16, &|_| 0)) } else { ("fp32", vec![]) };
        let scopes: BTreeMap<&str, Vec<&Row>> =
            file.scopes.iter().fold(BTreeMap::new(), |mut map, row| {
                map.entry(row.scope.as_str()).or_insert_with(Vec::new).push(row);
                map
            });
        let fits_fp8 = |row: &&Row| {
            let format = if row.kind == Kind::Gradient { e5m2 } else { e4m3 };
            let scale = top(row).map_or(0, |e| format.top - e);
            lost(row, format, scale) <= LOST
        };
        let fp8 = scopes.iter().filter(|(_, rows)| rows.iter().all(fits_fp8));
        let mut reasons = Vec::new();
        if !not_finite.is_empty() {
            reasons.push(format!(
                "values in {} were not finite: find out why with `frit run --check-numerics` first",
                not_finite.join(", ")
            ));
        }
        if let Some(largest) = largest {
            reasons.push(format!(
                "the largest gradient is below 2^{}; scaled by 2^{shift} it stays {HEADROOM} \
                 powers of two below the maximum of f16",
                largest + 1
            ));
        }
        let share = |row: &Row, shift| 100.0 * row.histogram.underflow(f16, shift);
        let worst = gradients().max_by(|a, b| share(a, 0).total_cmp(&share(b, 0)));
        if let Some(row) = worst.filter(|row| share(row, 0) > 0.0) {
            reasons.push(format!(
                "without loss scaling f16 would lose {:.2} % of the gradients of `{}`, with 2^{shift} {:.2} %",
                share(row, 0),
                scope(row),
                share(row, shift)
            ));
        }
        if file.compute_dtype == "f16" {
            reasons.push(
                "measured in f16, where lost values are invisible: measure a plan in fp32 or bf16"
                    .into(),
            );
        }
        Policy {
            compute: compute.into(),
            fp16_init_scale: 2f64.powi(shift),
            fp16_fits: fp16_islands.is_empty(),
            fp16_islands,
            islands,
            fp8_scopes: fp8.map(|(name, _)| name.to_string()).collect(),
            reasons,
        }
    }

    /// For people, with the lines of train.toml.
    pub fn text(&self) -> String {
        let mut text = format!("recommended:\n\n[precision]\ncompute = \"{}\"\n", self.compute);
        for island in &self.islands {
            // Writing to a string does not fail.
            let _ =
                write!(text, "[[precision.override]]\nscope = \"{island}\"\ndtype = \"fp32\"\n");
        }
        text += "\n";
        if self.fp16_fits {
            let _ = writeln!(
                text,
                "fp16 fits too: compute = \"fp16\", init_scale = {}",
                self.fp16_init_scale
            );
        } else {
            let _ = writeln!(text, "fp16 does not fit {}", self.fp16_islands.join(", "));
        }
        if !self.fp8_scopes.is_empty() {
            let _ =
                writeln!(text, "fp8 with a scale per tensor fits {}", self.fp8_scopes.join(", "));
        }
        for reason in &self.reasons {
            let _ = writeln!(text, "because {reason}");
        }
        text
    }
}

/// The scope for people.
pub fn scope(row: &Row) -> String {
    if row.scope.is_empty() { "(root)".into() } else { row.scope.clone() }
}

fn names<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<String> {
    let mut names: Vec<String> = rows.map(scope).collect();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_runtime::numerics::Histogram;

    fn row(scope: &str, kind: Kind, values: &[f64]) -> Row {
        let mut histogram = Histogram::default();
        values.iter().for_each(|x| histogram.add(*x));
        Row { scope: scope.into(), kind, dtype: "f32".into(), histogram }
    }

    fn policy(scopes: Vec<Row>) -> Policy {
        let (frit_numerics, steps, ranks) = (FORMAT, 1, 1);
        Policy::of(&NumericsFile {
            frit_numerics,
            compute_dtype: "f32".into(),
            steps,
            ranks,
            scopes,
        })
    }

    #[test]
    fn small_gradients_ask_for_a_scale() {
        let p = policy(vec![
            row("h.0", Kind::Activation, &[1.0, 0.5, 3.0]),
            row("h.0", Kind::Gradient, &[1e-8, 2e-8, 1e-6]),
        ]);
        assert!(p.fp16_fits && p.fp16_islands.is_empty());
        // 1e-6 is below 2^-19: 2^24 is the largest that is recommended.
        assert_eq!(p.fp16_init_scale, 2f64.powi(24));
        assert!(p.reasons.iter().any(|r| r.contains("without loss scaling")), "{:?}", p.reasons);
        assert_eq!(p.compute, "bf16");
    }

    #[test]
    fn what_overflows_is_an_island() {
        let p = policy(vec![
            row("ffn", Kind::Activation, &[1.0, 1e5]),
            row("attn", Kind::Activation, &[1.0, 100.0]),
        ]);
        assert_eq!(p.fp16_islands, ["ffn"]);
        assert!(!p.fp16_fits && p.islands.is_empty());
        assert!(p.text().contains("fp16 does not fit ffn"));
    }

    #[test]
    fn a_wide_range_does_not_fit_fp8() {
        let wide: Vec<f64> = (-30..0).map(|e| 2f64.powi(e)).collect();
        let p = policy(vec![
            row("wide", Kind::Activation, &wide),
            row("narrow", Kind::Activation, &[1e-3, 2e-3, 3e-3]),
        ]);
        assert_eq!(p.fp8_scopes, ["narrow"]);
    }

    #[test]
    fn what_is_not_finite_comes_first() {
        let p = policy(vec![row("h", Kind::Activation, &[f64::NAN, 1.0])]);
        assert_eq!(p.compute, "fp32");
        assert!(p.reasons[0].contains("--check-numerics"));
    }

    #[test]
    fn nothing_measured_recommends_the_default() {
        assert_eq!(policy(vec![]).fp16_init_scale, 1.0);
    }
}
