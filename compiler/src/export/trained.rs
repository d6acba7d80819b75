//! Trained parameters: of a file that `frit run --save` wrote, of a checkpoint, or in memory.

use super::message::{Elements, Merge};
use crate::diagnostics::{Report, of_run};
use crate::import::mapped;
use crate::plan_dir;
use frit_ir::plan::{ParamHome, layout};
use frit_ir::{Code, DType, Diagnostic};
use frit_passes::adapter;
use frit_runtime::checkpoint::Checkpoint;
use frit_runtime::left_out::{self, AllLeftOut};
use frit_runtime::tensors::Tensor;
use frit_runtime::trainer::Stored;
use frit_runtime::weight_files;
use frit_runtime::{RunError, converted, safetensors_dtype};
use prost::bytes::Bytes;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Trained parameters, and the plan they belong to.
pub struct Trained {
    /// Where the plan's source is.
    pub(super) source: PathBuf,
    /// The parameters that the model must have.
    pub(super) names: Vec<String>,
    /// Tensors of an adapter that the plan does not have.
    others: Vec<String>,
    /// Those that it has from the model.
    left_out: AllLeftOut,
    values: Values,
}

enum Values {
    /// A file of weights, and the plan's, which has what that left out.
    File {
        path: PathBuf,
        file: Weights,
        plans: Option<Weights>,
    },
    Checkpoint(Checkpoint),
    /// Tensors in memory, and the plan directory.
    Given(PathBuf, BTreeMap<String, Stored>),
}

/// Names that an error lists at most.
const LISTED: usize = 8;

fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    names[..names.len().min(LISTED)].join(", ") + &more
}

/// A file of weights in memory.
struct Weights {
    bytes: Bytes,
    metadata: Metadata,
    /// Where its data begin.
    data: usize,
}

impl Weights {
    /// Reads a header.
    fn of(bytes: Bytes) -> Result<Weights, String> {
        let read = SafeTensors::read_metadata(&bytes).map_err(|e| e.to_string())?;
        let (header, metadata) = read;
        // The header's length stands before it.
        let data = header + size_of::<u64>();
        if metadata.data_len() != bytes.len() - data {
            return Err("it is not complete".into());
        }
        Ok(Weights { bytes, metadata, data })
    }

    /// The elements of a tensor, if it is there.
    fn get(&self, name: &str) -> Option<&[u8]> {
        let (begin, end) = self.metadata.info(name)?.data_offsets;
        Some(&self.bytes[self.data + begin..self.data + end])
    }
}

impl Trained {
    /// Parameters in memory of the plan of a directory.
    pub fn given(plan: &Path, tensors: BTreeMap<String, Stored>) -> Trained {
        Trained {
            source: plan.join(layout::SOURCE),
            names: tensors.keys().cloned().collect(),
            others: vec![],
            left_out: AllLeftOut::new(),
            values: Values::Given(plan.into(), tensors),
        }
    }

    /// The weights of a file for the plan of a directory.
    ///
    /// # Errors
    /// If one of them cannot be read.
    pub fn of_plan(plan: &Path, weights: &Path) -> Result<Trained, Report> {
        let unusable = |e: RunError| Diagnostic::error(Code::ExportWeights, e.to_string());
        let files = weight_files::expand(weights).map_err(unusable)?;
        let [weights] = &files[..] else {
            let what = format!("{} stands for {} files", weights.display(), files.len());
            return Err(Diagnostic::error(Code::ExportWeights, what)
                .help("give the one file that `frit run --save` wrote")
                .into());
        };
        let refuse = |e: String| {
            Diagnostic::error(Code::ExportWeights, format!("{}: {e}", weights.display()))
        };
        let bytes = mapped::map(weights).map_err(|e| {
            Diagnostic::error(
                Code::ExportWeights,
                format!("cannot read {}: {e}", weights.display()),
            )
            .help("give a file that `frit run --save` wrote")
        })?;
        let file = Weights::of(bytes).map_err(|e| {
            refuse(format!("not a safetensors file: {e}"))
                .help("give a file that `frit run --save` wrote")
        })?;
        let left_out = left_out::of_metadata(&file.metadata).map_err(refuse)?;
        known(&left_out, weights)?;
        let plans = match left_out.is_empty() {
            true => None,
            false => mapped::map(&plan.join(layout::WEIGHTS)).ok(),
        };
        let plans = plans.and_then(|bytes| Weights::of(bytes).ok());
        let params = plan_dir::read(plan)?.params;
        let known: BTreeSet<&str> = params.iter().map(|p| p.name.as_str()).collect();
        let names = file.metadata.offset_keys().into_iter();
        let others =
            names.filter(|n| !known.contains(n.as_str()) && weight_files::is_of_adapter(n));
        let mut others: Vec<String> = others.map(|name| format!("`{name}`")).collect();
        others.sort();
        let used = params.into_iter().filter(|p| p.home != ParamHome::Unused);
        let used = used.filter(|p| !left_out.contains_key(&p.name));
        Ok(Trained {
            source: plan.join(layout::SOURCE),
            names: used.map(|p| p.name).collect(),
            others,
            left_out: left_out.clone(),
            values: Values::File { path: weights.into(), file, plans },
        })
    }

    /// The parameters of a checkpoint.
    ///
    /// # Errors
    /// If it leaves out parameters that are not those of its model.
    pub fn of_checkpoint(checkpoint: Checkpoint) -> Result<Trained, Report> {
        known(&checkpoint.index.left_out, &checkpoint.path)?;
        let names = checkpoint.parameters().map(str::to_string).collect();
        let (source, left_out) = (checkpoint.source(), checkpoint.index.left_out.clone());
        let source = source.map_err(of_run)?;
        let (others, values) = (vec![], Values::Checkpoint(checkpoint));
        Ok(Trained { source, names, others, left_out, values })
    }

    /// Checks that there is no adapter of another plan.
    ///
    /// # Errors
    /// If there are.
    pub(super) fn check_others(&self) -> Result<(), Diagnostic> {
        if self.others.is_empty() {
            return Ok(());
        }
        let what = format!(
            "{} holds an adapter that the plan does not have: {}",
            self.path().display(),
            listed(&self.others)
        );
        Err(Diagnostic::error(Code::ExportWeights, what)
            .help("give the weights of a run of this plan"))
    }

    /// That parameters of the plan are not there.
    pub(super) fn lacks(&self, missing: &[&String]) -> Diagnostic {
        let path = self.path().display();
        let what = match missing {
            all if all.len() == self.names.len() => {
                format!("{path} holds no parameter of the plan")
            }
            [one] => format!("{path} holds no `{one}`"),
            [first, ..] => format!(
                "{path} lacks {} of {} parameters of the plan, such as `{first}`",
                missing.len(),
                self.names.len()
            ),
            [] => format!("{path} holds no weights"),
        };
        Diagnostic::error(Code::ExportWeights, what).help(
            "give the file that `frit run --save` wrote with this plan, or a checkpoint of it instead of the plan",
        )
    }

    /// Whether these elements, of ONNX's data type of this number, are those of a parameter that was left out.
    pub(super) fn left_out_is(&self, name: &str, onnx: u64, data: &[u8]) -> bool {
        let dtype = match onnx {
            1 => DType::F32,
            10 => DType::F16,
            16 => DType::BF16,
            _ => return false,
        };
        self.left_out.get(name).is_some_and(|left_out| left_out.is(dtype, data))
    }

    /// Element type and shape of a parameter, if present.
    pub(super) fn ty(&self, name: &str) -> Option<(Dtype, &[usize])> {
        match &self.values {
            Values::File { file, .. } => {
                let own = file.metadata.info(name);
                let info = own.or_else(|| self.plans(name)?.metadata.info(name));
                info.map(|i| (i.dtype, &i.shape[..]))
            }
            Values::Checkpoint(checkpoint) => {
                let entry = checkpoint.entry(&format!("param/{name}"))?;
                Some((safetensors_dtype(entry.dtype), &entry.shape))
            }
            Values::Given(_, tensors) => {
                tensors.get(name).map(|(ty, _)| (safetensors_dtype(ty.dtype), ty.shape.dims()))
            }
        }
    }

    /// The plan's weights, if a parameter that was left out had its value there.
    fn plans(&self, name: &str) -> Option<&Weights> {
        let Values::File { plans, .. } = &self.values else { return None };
        plans.as_ref().filter(|_| self.left_out.get(name).is_some_and(|left_out| left_out.of_plan))
    }

    /// Little-endian elements of a parameter, which must be there.
    fn data(&self, name: &str) -> Result<Cow<'_, [u8]>, Diagnostic> {
        match &self.values {
            Values::File { file, .. } => {
                let data = file.get(name).or_else(|| self.plans(name)?.get(name));
                Ok(Cow::Borrowed(data.unwrap_or_default()))
            }
            Values::Checkpoint(checkpoint) => {
                let bytes = checkpoint.tensor(&format!("param/{name}"));
                bytes
                    .map(Cow::Owned)
                    .map_err(|e| Diagnostic::error(Code::ExportWeights, e.to_string()))
            }
            Values::Given(_, tensors) => {
                let stored = tensors.get(name).expect("invariant: it is there");
                Ok(Cow::Borrowed(&stored.1[..]))
            }
        }
    }

    /// The elements as the model stores them.
    pub(super) fn elements<'e>(
        &'e self,
        elements: &'e Elements,
    ) -> Result<Cow<'e, [u8]>, Diagnostic> {
        let name = elements.parameter.as_str();
        let (mut dtype, shape) = self.ty(name).unwrap_or((Dtype::F32, &[]));
        let mut data = match &elements.adapter {
            Some(Merge { base: Some((base, _)), .. }) => Cow::Borrowed(&base[..]),
            _ => self.data(name)?,
        };
        if let Some(merge) = &elements.adapter {
            data = Cow::Owned(self.merged(name, dtype, &data, merge)?);
            dtype = Dtype::F32;
        }
        if let (true, &[rows, columns]) = (elements.transposed, shape) {
            data = Cow::Owned(transposed(&data, rows, columns));
        }
        Ok(convert(dtype, data, elements.dtype))
    }

    /// A parameter as it is stored, if present.
    ///
    /// # Errors
    /// If a checkpoint cannot be read.
    pub(super) fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, Diagnostic> {
        let Some((dtype, shape)) = self.ty(name) else { return Ok(None) };
        Ok(Some(Tensor { dtype, shape: shape.to_vec(), bytes: self.data(name)? }))
    }

    /// The f32 elements of a weight with its adapter: `W + s·B·A`.
    fn merged(
        &self,
        name: &str,
        dtype: Dtype,
        data: &[u8],
        merge: &Merge,
    ) -> Result<Vec<u8>, Diagnostic> {
        let [rows, columns] = merge.shape;
        let dtype = merge.base.as_ref().map_or(dtype, |(_, onnx)| of_onnx(*onnx));
        let mut weight = floats(dtype, data);
        let [a_name, b_name] = adapter::names(name);
        let matrix = |name: &str| -> Result<Vec<f32>, Diagnostic> {
            let dtype = self.ty(name).map_or(Dtype::F32, |(dtype, _)| dtype);
            Ok(floats(dtype, &self.data(name)?))
        };
        let (a, b) = (matrix(&a_name)?, matrix(&b_name)?);
        let (width, height) = if merge.out_first { (columns, rows) } else { (rows, columns) };
        let rank = a.len() / width.max(1);
        let mut row = vec![0.0_f64; width];
        for out in 0..height {
            row.fill(0.0);
            for (k, factor) in b[out * rank..][..rank].iter().enumerate() {
                let terms = row.iter_mut().zip(&a[k * width..][..width]);
                terms.for_each(|(sum, a)| *sum += f64::from(*factor) * f64::from(*a));
            }
            for (at, delta) in row.iter().enumerate() {
                let place = if merge.out_first { out * columns + at } else { at * columns + out };
                let sum = f64::from(weight[place]) + f64::from_bits(merge.scale) * delta;
                weight[place] = sum as f32;
            }
        }
        Ok(weight.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    /// Their source.
    pub(super) fn path(&self) -> &Path {
        match &self.values {
            Values::File { path, .. } => path,
            Values::Checkpoint(checkpoint) => &checkpoint.path,
            Values::Given(plan, _) => plan,
        }
    }
}

/// Whether omitted parameters have the values of the model that the plan was compiled from.
fn known(left_out: &AllLeftOut, path: &Path) -> Result<(), Diagnostic> {
    let Some((name, _)) = left_out.iter().find(|(_, l)| !l.of_plan) else { return Ok(()) };
    let what = format!("{} omits `{name}`, whose value is not from the plan", path.display());
    Err(Diagnostic::error(Code::ExportWeights, what).help(
        "write all parameters: `frit run PLAN --resume --checkpoint DIR --weights BASE --save FILE`, without \
         --trained-only",
    ))
}

/// The matrix with its axes exchanged.
fn transposed(data: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    let size = data.len() / (rows * columns).max(1);
    let mut turned = Vec::with_capacity(data.len());
    for column in 0..columns {
        for row in 0..rows {
            turned.extend_from_slice(&data[(row * columns + column) * size..][..size]);
        }
    }
    turned
}

/// The type of floats that ONNX numbers so.
fn of_onnx(number: u64) -> Dtype {
    match number {
        10 => Dtype::F16,
        16 => Dtype::BF16,
        11 => Dtype::F64,
        _ => Dtype::F32,
    }
}

/// Floats of any type as f32.
fn floats(dtype: Dtype, data: &[u8]) -> Vec<f32> {
    if dtype == Dtype::F64 {
        let (values, _) = data.as_chunks::<8>();
        return values.iter().map(|b| f64::from_le_bytes(*b) as f32).collect();
    }
    let wide = convert(dtype, Cow::Borrowed(data), 1);
    let (values, _) = wide.as_chunks::<4>();
    values.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Bytes of an element of ONNX's data type of this number, if the type of the parameter can be stored so.
pub(super) fn stored_size(dtype: Dtype, to: u64) -> Option<u64> {
    match (dtype, to) {
        (Dtype::F64, 11) => Some(8),
        (Dtype::F32 | Dtype::F16 | Dtype::BF16, 1) => Some(4),
        (Dtype::F32 | Dtype::F16 | Dtype::BF16, 10 | 16) => Some(2),
        (Dtype::F32 | Dtype::F16 | Dtype::BF16, 11) => Some(8),
        _ => None,
    }
}

/// The elements in the data type of the initializer, by ONNX's number, to which [`stored_size`] is known. Parameters
/// that did not train may have been held in fewer bits than the model has.
fn convert(stored: Dtype, data: Cow<'_, [u8]>, to: u64) -> Cow<'_, [u8]> {
    let from = match stored {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        _ => return data,
    };
    let between = |data: Cow<'_, [u8]>, from, to| {
        let converted = converted(&data, from, to).expect("invariant: floats of a parameter");
        converted.into_owned()
    };
    match to {
        1 if from == DType::F32 => data,
        1 => Cow::Owned(between(data, from, DType::F32)),
        10 => Cow::Owned(between(data, from, DType::F16)),
        16 => Cow::Owned(between(data, from, DType::BF16)),
        _ => {
            let wide = between(data, from, DType::F32);
            let (values, _) = wide.as_chunks::<4>();
            let values = values.iter().map(|b| f64::from(f32::from_le_bytes(*b)));
            Cow::Owned(values.flat_map(f64::to_le_bytes).collect())
        }
    }
}
