//! Normalization by layers, groups, batches and instances.

use super::super::call::{Call, Fault, Outcome, float, int, unsupported};
use super::super::dtype::F32;
use super::super::translate::{Int, Tensor, Value, value_name};
use super::{Convert, RENEWED, one};
use std::slice::from_ref;

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("_batch_norm_no_update", |c| batch(c, Some(false))),
    ("_batch_norm_with_update", |c| batch(c, Some(true))),
    ("_batch_norm_with_update_functional", |c| batch(c, Some(true))),
    ("_fused_rms_norm", rms),
    ("_native_batch_norm_legit", |c| batch(c, None)),
    ("_native_batch_norm_legit_functional", |c| batch(c, None)),
    ("_native_batch_norm_legit_no_training", |c| batch(c, Some(false))),
    ("batch_norm", |c| batch(c, None)),
    ("group_norm", |c| group(c, "num_groups")),
    ("instance_norm", instance),
    ("layer_norm", layer),
    ("native_batch_norm", |c| batch(c, None)),
    ("native_group_norm", |c| group(c, "group")),
    ("native_layer_norm", layer),
    ("rms_norm", rms),
];

/// The tensor in an argument, or one number in the given sizes.
fn or_full(c: &mut Call<'_>, name: &str, sizes: &[Int], value: f64) -> Result<String, Fault> {
    Ok(match c.optional(name)? {
        Some(tensor) => tensor.name,
        None => c.full(sizes, F32, value),
    })
}

fn layer(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("input")?;
    let sizes = c.sizes("normalized_shape")?.unwrap_or_default();
    let scale = or_full(c, "weight", &sizes, 1.0)?;
    let mut inputs = vec![x.name, scale];
    inputs.extend(c.optional("bias")?.map(|b| b.name));
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let eps = c.float("eps", 1e-5)?;
    let attributes = vec![int("axis", -(sizes.len() as i64)), float("epsilon", eps)];
    one(c.with("LayerNormalization", &inputs, attributes))
}

fn rms(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("input")?;
    let sizes = c.sizes("normalized_shape")?.unwrap_or_default();
    let scale = or_full(c, "weight", &sizes, 1.0)?;
    // PyTorch's default is the distance of 1 to the next number.
    let eps = c.float_given("eps")?.unwrap_or(f64::from(f32::EPSILON));
    let attributes = vec![int("axis", -(sizes.len() as i64)), float("epsilon", eps)];
    one(c.with("RMSNormalization", &[&x.name, &scale], attributes))
}

fn channels(c: &mut Call<'_>, x: &Tensor) -> Result<Int, Fault> {
    if x.dims.len() < 2 {
        return Err(Fault::Damaged(format!("an operand of rank {}", x.dims.len())));
    }
    Ok(c.size_of(x, 1))
}

fn group(c: &mut Call<'_>, groups: &str) -> Outcome {
    let x = c.tensor("input")?;
    let n = channels(c, &x)?;
    let scale = or_full(c, "weight", from_ref(&n), 1.0)?;
    let bias = or_full(c, "bias", &[n], 0.0)?;
    let eps = c.float("eps", 1e-5)?;
    let attributes = vec![int("num_groups", c.int(groups, 1)?), float("epsilon", eps)];
    one(c.with("GroupNormalization", &[&x.name, &scale, &bias], attributes))
}

fn instance(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("input")?;
    if !c.bool("use_input_stats", true)? || c.argument("running_mean").is_some() {
        return unsupported("running statistics");
    }
    let n = channels(c, &x)?;
    let scale = or_full(c, "weight", from_ref(&n), 1.0)?;
    let bias = or_full(c, "bias", &[n], 0.0)?;
    let eps = c.float("eps", 1e-5)?;
    one(c.with("InstanceNormalization", &[&x.name, &scale, &bias], vec![float("epsilon", eps)]))
}

/// A running statistic, also after another call renewed it; `None` if the module keeps none.
fn statistic(c: &Call<'_>, name: &str) -> Result<Option<Tensor>, Fault> {
    let given = c.argument(name).and_then(value_name);
    match given.map(|name| c.value(name)).transpose()? {
        Some(Value::Renewed(tensor)) => Ok(Some(tensor.clone())),
        _ => c.optional(name),
    }
}

/// By the batch, if it trains, whose statistics renew the running ones: the importer knows these by the buffers.
fn batch(c: &mut Call<'_>, trains: Option<bool>) -> Outcome {
    let x = c.tensor("input")?;
    let n = channels(c, &x)?;
    let trains = match trains {
        Some(trains) => trains,
        None => c.bool("training", true)?,
    };
    let (mean, variance) = (statistic(c, "running_mean")?, statistic(c, "running_var")?);
    let trains = trains || mean.is_none();
    let scale = or_full(c, "weight", from_ref(&n), 1.0)?;
    let bias = or_full(c, "bias", from_ref(&n), 0.0)?;
    let (own_mean, own_variance) = match (&mean, &variance) {
        (Some(mean), Some(variance)) => (mean.name.clone(), variance.name.clone()),
        _ => (c.full(from_ref(&n), F32, 0.0), c.full(&[n], F32, 1.0)),
    };
    let momentum = c.float("momentum", 0.1)?;
    let attributes = vec![
        float("epsilon", c.float("eps", 1e-5)?),
        float("momentum", 1.0 - momentum),
        int("training_mode", trains.into()),
    ];
    let inputs = [x.name.as_str(), &scale, &bias, &own_mean, &own_variance];
    let results = c.all("BatchNormalization", &inputs, attributes, if trains { 3 } else { 1 });
    let mut outputs = vec![results[0].clone()];
    if c.op.ends_with("_functional") {
        // Mean and deviation of the batch, for a backward pass; a reserve in one of them.
        outputs.extend([String::new(), String::new()]);
        if c.op.starts_with("_batch_norm") {
            outputs.push(String::new());
        }
        outputs.push(format!("{RENEWED}{own_mean}"));
        outputs.push(format!("{RENEWED}{own_variance}"));
    }
    Ok(outputs)
}
