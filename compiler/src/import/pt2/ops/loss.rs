//! Losses that are part of the model.

use super::super::call::{Call, Fault, Outcome, int, text, unsupported};
use super::super::dtype::is_float;
use super::super::translate::Tensor;
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("binary_cross_entropy", |c| binary(c, false)),
    ("binary_cross_entropy_with_logits", |c| binary(c, true)),
    ("cross_entropy_loss", cross_entropy),
    ("huber_loss", |c| huber(c, "delta")),
    ("kl_div", kl_div),
    ("l1_loss", |c| {
        let d = difference(c)?;
        let y = c.add("Abs", &[&d]);
        reduced(c, y)
    }),
    ("mse_loss", |c| {
        let d = difference(c)?;
        let y = c.add("Mul", &[&d, &d]);
        reduced(c, y)
    }),
    ("nll_loss", nll),
    ("nll_loss2d_forward", nll),
    ("nll_loss_forward", nll),
    ("nll_loss_nd", nll),
    ("poisson_nll_loss", poisson),
    ("smooth_l1_loss", |c| huber(c, "beta")),
    ("soft_margin_loss", |c| {
        let (x, y, _) = super::pointwise::operands(c, ["self", "target"])?;
        let z = c.add("Mul", &[&x, &y]);
        let z = c.add("Neg", &[&z]);
        let losses = c.add("Softplus", &[&z]);
        reduced(c, losses)
    }),
];

/// PyTorch's number of a reduction, in ONNX's words.
fn reduction(c: &Call<'_>) -> Result<&'static str, Fault> {
    match c.int("reduction", 1)? {
        0 => Ok("none"),
        1 => Ok("mean"),
        2 => Ok("sum"),
        other => Err(Fault::Damaged(format!("reduction {other}"))),
    }
}

pub(super) fn reduced(c: &mut Call<'_>, losses: String) -> Outcome {
    one(match reduction(c)? {
        "mean" => c.reduce("ReduceMean", &losses, &[], false),
        "sum" => c.reduce("ReduceSum", &losses, &[], false),
        _ => losses,
    })
}

fn difference(c: &mut Call<'_>) -> Result<String, Fault> {
    let (a, b, _) = super::pointwise::operands(c, ["self", "target"])?;
    Ok(c.add("Sub", &[&a, &b]))
}

/// Scores and labels; one example without a batch gets its axis for it.
fn scored(c: &mut Call<'_>) -> Result<(Tensor, Tensor), Fault> {
    let (mut scores, mut labels) = (c.tensor("self")?, c.tensor("target")?);
    if scores.dims.len() == 1 {
        scores.name = c.unsqueeze(&scores.name, &[0]);
        scores.dims.insert(0, Some(1));
        labels.name = c.unsqueeze(&labels.name, &[0]);
        labels.dims.insert(0, Some(1));
    }
    Ok((scores, labels))
}

fn labeled(
    c: &mut Call<'_>,
    f: &str,
    scores: &str,
    labels: &str,
    how: &str,
) -> Result<String, Fault> {
    let mut inputs = vec![scores.to_string(), labels.to_string()];
    inputs.extend(c.optional("weight")?.map(|w| w.name));
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let attributes =
        vec![int("ignore_index", c.int("ignore_index", -100)?), text("reduction", how)];
    Ok(c.with(f, &inputs, attributes))
}

fn nll(c: &mut Call<'_>) -> Outcome {
    let (scores, labels) = scored(c)?;
    let how = reduction(c)?;
    let y = labeled(c, "NegativeLogLikelihoodLoss", &scores.name, &labels.name, how)?;
    one(y)
}

fn cross_entropy(c: &mut Call<'_>) -> Outcome {
    let (scores, labels) = scored(c)?;
    let (how, smoothing) = (reduction(c)?, c.float("label_smoothing", 0.0)?);
    let Some(Some(classes)) = scores.dims.get(1).copied() else {
        return unsupported("a dynamic number of classes");
    };
    if is_float(labels.dtype) {
        return of_probabilities(c, &scores, labels, (how, smoothing, classes));
    }
    let f = "SoftmaxCrossEntropyLoss";
    if smoothing == 0.0 {
        let y = labeled(c, f, &scores.name, &labels.name, how)?;
        return one(y);
    }
    if c.argument("weight").is_some() {
        return unsupported("label_smoothing with weights of classes");
    }
    // Beside the label, every class counts the same.
    let hit = labeled(c, f, &scores.name, &labels.name, "none")?;
    let logs = c.with("LogSoftmax", &[&scores.name], vec![int("axis", 1)]);
    let mean = c.reduce("ReduceMean", &logs, &[1], false);
    let ignored = c.number(labels.dtype, c.float("ignore_index", -100.0)?);
    let ignored = c.add("Equal", &[&labels.name, &ignored]);
    let (zero, one_) = (c.number(scores.dtype, 0.0), c.number(scores.dtype, 1.0));
    let mean = c.add("Where", &[&ignored, &zero, &mean]);
    let (keep, spread) =
        (c.number(scores.dtype, 1.0 - smoothing), c.number(scores.dtype, smoothing));
    let hit = c.add("Mul", &[&hit, &keep]);
    let mean = c.add("Mul", &[&mean, &spread]);
    let losses = c.add("Sub", &[&hit, &mean]);
    if how != "mean" {
        return reduced(c, losses);
    }
    let counted = c.add("Where", &[&ignored, &zero, &one_]);
    let (sum, n) =
        (c.reduce("ReduceSum", &losses, &[], false), c.reduce("ReduceSum", &counted, &[], false));
    one(c.add("Div", &[&sum, &n]))
}

/// Against a distribution of each example.
fn of_probabilities(
    c: &mut Call<'_>,
    scores: &Tensor,
    labels: Tensor,
    (how, smoothing, classes): (&str, f64, i64),
) -> Outcome {
    if c.argument("weight").is_some() {
        return unsupported("probabilities with weights of classes");
    }
    let mut p = c.cast(&labels.name, labels.dtype, scores.dtype);
    if smoothing != 0.0 {
        let keep = c.number(scores.dtype, 1.0 - smoothing);
        let spread = c.number(scores.dtype, smoothing / classes.max(1) as f64);
        p = c.add("Mul", &[&p, &keep]);
        p = c.add("Add", &[&p, &spread]);
    }
    let logs = c.with("LogSoftmax", &[&scores.name], vec![int("axis", 1)]);
    let products = c.add("Mul", &[&p, &logs]);
    let losses = c.reduce("ReduceSum", &products, &[1], false);
    let losses = c.add("Neg", &[&losses]);
    if how == "none" {
        return one(losses);
    }
    reduced(c, losses)
}

/// Squares up to a limit, then lines. `smooth_l1_loss` divides by the limit.
fn huber(c: &mut Call<'_>, name: &str) -> Outcome {
    let limit = c.float(name, 1.0)?;
    let x = c.tensor("self")?;
    let d = difference(c)?;
    let size = c.add("Abs", &[&d]);
    if limit == 0.0 {
        return reduced(c, size);
    }
    let squares = c.add("Mul", &[&d, &d]);
    let smooth = name == "beta";
    let half = c.number(x.dtype, if smooth { 0.5 / limit } else { 0.5 });
    let squares = c.add("Mul", &[&squares, &half]);
    let offset = c.number(x.dtype, 0.5 * limit);
    let mut lines = c.add("Sub", &[&size, &offset]);
    let bound = c.number(x.dtype, limit);
    if !smooth {
        lines = c.add("Mul", &[&lines, &bound]);
    }
    let near = c.add("Less", &[&size, &bound]);
    let y = c.add("Where", &[&near, &squares, &lines]);
    reduced(c, y)
}

fn binary(c: &mut Call<'_>, logits: bool) -> Outcome {
    let (x, target) = (c.tensor("self")?, c.tensor("target")?);
    let t = c.cast(&target.name, target.dtype, x.dtype);
    let one_ = c.number(x.dtype, 1.0);
    let rest = c.add("Sub", &[&one_, &t]);
    let mut y = if logits {
        // `(1 − t)·x + w·softplus(−x)`, which does not overflow.
        let line = c.add("Mul", &[&rest, &x.name]);
        let minus = c.add("Neg", &[&x.name]);
        let mut soft = c.add("Softplus", &[&minus]);
        if let Some(weight) = c.optional("pos_weight")? {
            let more = c.add("Sub", &[&weight.name, &one_]);
            let more = c.add("Mul", &[&more, &t]);
            let weight = c.add("Add", &[&more, &one_]);
            soft = c.add("Mul", &[&soft, &weight]);
        }
        c.add("Add", &[&line, &soft])
    } else {
        let least = c.number(x.dtype, -100.0);
        let miss = c.add("Sub", &[&one_, &x.name]);
        let mut log = |x: &str| {
            let y = c.add("Log", &[x]);
            c.add("Max", &[&y, &least])
        };
        let (a, b) = (log(&x.name), log(&miss));
        let (a, b) = (c.add("Mul", &[&t, &a]), c.add("Mul", &[&rest, &b]));
        let sum = c.add("Add", &[&a, &b]);
        c.add("Neg", &[&sum])
    };
    if let Some(weight) = c.optional("weight")? {
        y = c.add("Mul", &[&y, &weight.name]);
    }
    reduced(c, y)
}

fn kl_div(c: &mut Call<'_>) -> Outcome {
    let (x, target) = (c.tensor("self")?, c.tensor("target")?);
    let y = if c.bool("log_target", false)? {
        let (p, d) = (c.add("Exp", &[&target.name]), c.add("Sub", &[&target.name, &x.name]));
        c.add("Mul", &[&p, &d])
    } else {
        // `t·log t` is zero where t is.
        let (zero, one_) = (c.number(target.dtype, 0.0), c.number(target.dtype, 1.0));
        let none = c.add("Equal", &[&target.name, &zero]);
        let safe = c.add("Where", &[&none, &one_, &target.name]);
        let log = c.add("Log", &[&safe]);
        let d = c.add("Sub", &[&log, &x.name]);
        c.add("Mul", &[&target.name, &d])
    };
    reduced(c, y)
}

/// Of a count and the rate that is expected, or its logarithm.
fn poisson(c: &mut Call<'_>) -> Outcome {
    let (x, y, d) = super::pointwise::operands(c, ["input", "target"])?;
    let (is_log, is_full) = (c.bool("log_input", true)?, c.bool("full", false)?);
    let mut losses = if is_log {
        let (rate, product) = (c.add("Exp", &[&x]), c.add("Mul", &[&y, &x]));
        c.add("Sub", &[&rate, &product])
    } else {
        let eps = c.number(d, c.float("eps", 1e-8)?);
        let safe = c.add("Add", &[&x, &eps]);
        let log = c.add("Log", &[&safe]);
        let product = c.add("Mul", &[&y, &log]);
        c.add("Sub", &[&x, &product])
    };
    if is_full {
        // Stirling's approximation of ln y!, where y is above 1.
        let [zero, more, half, turn] =
            [0.0, 1.0, 0.5, std::f64::consts::TAU].map(|n| c.number(d, n));
        let is_many = c.add("Greater", &[&y, &more]);
        let n = c.add("Where", &[&is_many, &y, &more]);
        let log = c.add("Log", &[&n]);
        let main = c.add("Mul", &[&n, &log]);
        let main = c.add("Sub", &[&main, &n]);
        let rest = c.add("Mul", &[&turn, &n]);
        let rest = c.add("Log", &[&rest]);
        let rest = c.add("Mul", &[&half, &rest]);
        let sum = c.add("Add", &[&main, &rest]);
        let sum = c.add("Where", &[&is_many, &sum, &zero]);
        losses = c.add("Add", &[&losses, &sum]);
    }
    reduced(c, losses)
}
