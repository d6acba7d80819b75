//! Loads initial parameters from files instead of the plan, for a run or an evaluation.
//!
//! Together the files must contain every parameter of the plan and no others, under the names that `--save` writes or under those that
//! [`weight_names`] explains; for a parameter in several files the last wins. Two omissions are allowed: parameters that a `--trained-only` file
//! omits, if the plan or another file has values with the recorded digests; and all trained parameters, when a base
//! model gets new ones. 16-bit values are widened where the plan has f32. Buffers that libraries store beside parameters, and which a
//! plan has as constants, are not read.

use crate::RunError;
use crate::checkpoint::Checkpoint;
use crate::convert::converted;
use crate::first_values;
use crate::left_out::{self, AllLeftOut};
use crate::plan_dir::PlanDir;
use crate::save::{self, Tensors};
use crate::weight_files::{self, PEFT_PREFIX, is_buffer, is_of_adapter};
use crate::weight_names::{self, Names};
use frit_data::Batch;
use frit_ir::plan::{ParamHome, ParamId, ParamSpec, Plan};
use frit_ir::{DType, TensorType};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Maximum names of one kind that an error lists.
const LISTED: usize = 8;
/// How tensors that are not parameters of the plan are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Others {
    /// They are errors.
    Refused,
    /// They are ignored, but for adapters: an evaluation reads fewer parameters than the training.
    Ignored,
}

/// Parameters to start from instead of the plan's.
#[derive(Default)]
pub(crate) struct Replaced {
    pub(crate) tensors: Tensors,
    /// What is named otherwise in the files, in words.
    pub(crate) notes: Vec<String>,
}

/// Reads the parameters of a plan: those of `dir`, or fewer. Omitted ones are not in the result.
///
/// # Errors
/// If a file cannot be read, or the files do not fit, with all parameters that are missing, unknown, of another
/// type or not finite; or if one was trained on another base model.
pub(crate) fn read(
    paths: &[PathBuf],
    dir: &PlanDir,
    plan: &Plan,
    others: Others,
) -> Result<Replaced, RunError> {
    if paths.is_empty() {
        return Ok(Replaced::default());
    }
    let mut found = Found { names_files: paths.len() > 1, ..Found::default() };
    for path in paths {
        found.add(&weight_files::expand(path)?, plan, others)?;
    }
    found.missing(plan, Base::Suffices);
    found.nothing(plan);
    let all: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    found.refuse(Path::new(&all.join(", ")))?;
    for (path, left_out) in &found.left_out {
        if let Some(reason) = left_out::compare(left_out, plan, dir, &found.all)? {
            return Err(RunError::data(path, reason));
        }
    }
    Ok(found.replaced())
}

/// The parameters of a plan among tensors in memory, which have to be all.
///
/// # Errors
/// If they do not fit, as [`read`].
pub(crate) fn given(tensors: &Batch, plan: &Plan) -> Result<Replaced, RunError> {
    let mut found = Found::default();
    let views = tensors.names().filter_map(|name| Some((name, tensors.tensor(name)?)));
    found.take(plan, Others::Refused, &views.collect(), Path::new("state"));
    found.missing(plan, Base::Needed);
    found.refuse(Path::new("state"))?;
    Ok(found.replaced())
}

/// The parameters that a run reads from files: all, or those that the resumed checkpoint omits.
///
/// # Errors
/// As [`read`], or if the checkpoint was trained on another base model.
pub(crate) fn instead(
    paths: &[PathBuf],
    dir: &PlanDir,
    resumed: Option<&Checkpoint>,
) -> Result<Replaced, RunError> {
    let plan = &dir.plan;
    match resumed {
        None => read(paths, dir, plan, Others::Refused),
        Some(checkpoint) => base(checkpoint, paths, dir, plan, Others::Refused),
    }
}

/// The parameters that a checkpoint omits and files contain.
///
/// # Errors
/// As [`instead`].
pub(crate) fn base(
    checkpoint: &Checkpoint,
    paths: &[PathBuf],
    dir: &PlanDir,
    plan: &Plan,
    others: Others,
) -> Result<Replaced, RunError> {
    let left_out = &checkpoint.index.left_out;
    if left_out.is_empty() {
        return Ok(Replaced::default());
    }
    let mut files = read(paths, dir, plan, others)?;
    files.tensors.retain(|name, _| left_out.contains_key(name));
    match left_out::compare(left_out, plan, dir, &files.tensors)? {
        None => Ok(files),
        Some(reason) => Err(RunError::checkpoint(&checkpoint.path, reason)),
    }
}

/// Whether the parameters of a base model are enough, so that what trains keeps its first values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Base {
    Suffices,
    Needed,
}

/// The content of the files.
#[derive(Default)]
struct Found {
    all: Tensors,
    /// Parameters omitted by files of trained parameters.
    left_out: Vec<(PathBuf, AllLeftOut)>,
    /// Whether a file has an adapter of PEFT, which omits all else.
    has_adapter: bool,
    missing: Vec<String>,
    /// Errors by parameter.
    misfits: BTreeMap<String, String>,
    /// Elements that are not finite, by parameter.
    not_finite: BTreeMap<String, (String, f64)>,
    unknown: Vec<String>,
    notes: Vec<String>,
    /// Whether an error says which file a tensor is in.
    names_files: bool,
}

/// Type, shape and elements of a stored tensor.
type View<'t> = (Dtype, Vec<usize>, &'t [u8]);

impl Found {
    fn replaced(self) -> Replaced {
        Replaced { tensors: self.all, notes: self.notes }
    }

    /// Adds files that name their tensors alike: one, or the shards of a model.
    fn add(&mut self, paths: &[PathBuf], plan: &Plan, others: Others) -> Result<(), RunError> {
        let map = |path: &PathBuf| {
            let file = File::open(path).map_err(RunError::io(path))?;
            // SAFETY: the map is only read, and gone when this function ends.
            unsafe { Mmap::map(&file) }.map_err(RunError::io(path))
        };
        let maps = paths.iter().map(map).collect::<Result<Vec<Mmap>, RunError>>()?;
        let mut files = Vec::with_capacity(maps.len());
        for (path, bytes) in paths.iter().zip(&maps) {
            let refuse = |e| RunError::data(path, format!("not a safetensors file: {e}"));
            let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(refuse)?;
            let file = SafeTensors::deserialize(bytes).map_err(refuse)?;
            let left_out =
                left_out::of_metadata(&metadata).map_err(|reason| RunError::data(path, reason))?;
            if !left_out.is_empty() {
                self.left_out.push((path.into(), left_out));
            }
            if file.names().iter().any(|name| name.starts_with(PEFT_PREFIX)) {
                weight_files::check_adapter(path, &plan.config)?;
                self.has_adapter = true;
            }
            files.push(file);
        }
        let views = files.iter().flat_map(SafeTensors::iter);
        let tensors = views.map(|(name, v)| (name, (v.dtype(), v.shape().to_vec(), v.data())));
        let tensors = tensors.collect();
        let Some(path) = paths.first() else { return Ok(()) };
        self.take(plan, others, &tensors, path);
        Ok(())
    }

    /// Takes the parameters of a plan among tensors of a file, under their own names or others.
    fn take(
        &mut self,
        plan: &Plan,
        others: Others,
        tensors: &BTreeMap<&str, View<'_>>,
        path: &Path,
    ) {
        let params: BTreeMap<&str, &[usize]> =
            plan.params.iter().map(|p| (p.name.as_str(), p.ty.shape.dims())).collect();
        let shapes = tensors.iter().map(|(name, (_, shape, _))| (*name, shape.as_slice()));
        let same = |a: &str, b: &str| tensors[a].0 == tensors[b].0 && tensors[a].2 == tensors[b].2;
        let Names { tensors: named, copies, notes } =
            weight_names::find(&params, &shapes.collect(), same);
        self.notes.extend(notes.iter().map(|note| format!("{}: {note}", path.display())));
        let file = match self.names_files {
            true => format!(" of {}", path.display()),
            false => String::new(),
        };
        let used = plan.params.iter_enumerated().filter(|(_, p)| p.home != ParamHome::Unused);
        for (index, param) in used {
            let wanted = save::stored_type(param);
            let Some(tensor) = named.get(param.name.as_str()) else { continue };
            let (dtype, shape, bytes) = &tensors[tensor];
            if let Some(bytes) = widened(*dtype, shape, bytes, &wanted) {
                let trains = first_values::trains(plan, index);
                let found = first_values::not_finite(&bytes, wanted.dtype, trains);
                let name = &param.name;
                match found {
                    Some((element, value)) => {
                        let what = format!("`{name}`{file} ({value} in element {element})");
                        self.not_finite.insert(name.clone(), (what, value));
                    }
                    // That of an earlier file is replaced.
                    None => _ = self.not_finite.remove(name),
                }
                self.all.insert(param.name.clone(), bytes);
            } else {
                let name = &param.name;
                let what =
                    format!("`{name}`{file}, {dtype:?} {shape:?} where the plan expects {wanted}");
                self.misfits.insert(name.clone(), what);
            }
        }
        let own: BTreeSet<&str> = named.values().copied().chain(copies).collect();
        let is_refused = |name: &&str| {
            let is_adapter = name.starts_with(PEFT_PREFIX) || is_of_adapter(name);
            others == Others::Refused || own.is_empty() || is_adapter
        };
        let unknown = tensors.keys().copied().filter(|name| !own.contains(name));
        let (buffers, unknown): (Vec<&str>, Vec<&str>) =
            unknown.filter(is_refused).partition(|name| {
                let (dtype, shape, bytes) = &tensors[name];
                is_buffer(name, *dtype, shape, bytes)
            });
        if let [first, others @ ..] = &buffers[..] {
            let what = match others.len() {
                0 => format!("the buffer `{first}` is not read"),
                n => format!("{} buffers are not read, such as `{first}`", n + 1),
            };
            self.notes.push(format!("{}: {what}", path.display()));
        }
        self.unknown.extend(unknown.iter().map(|name| format!("`{name}`{file}")));
    }

    /// Records required parameters that no file contains.
    fn missing(&mut self, plan: &Plan, base: Base) {
        let used = plan.params.iter_enumerated().filter(|(_, p)| p.home != ParamHome::Unused);
        let trains = |i: ParamId| plan.eval.is_none() && plan.is_changed(i);
        let of_base = base == Base::Suffices
            && used.clone().all(|(i, p)| !trains(i) || !self.all.contains_key(&p.name));
        let is_there = |name: &str| self.all.contains_key(name) || self.misfits.contains_key(name);
        let is_left_out = |name: &str| self.left_out.iter().any(|(_, all)| all.contains_key(name));
        let lacks = |(i, p): &(ParamId, &ParamSpec)| {
            let of_model = self.has_adapter && !trains(*i);
            !(is_there(&p.name) || is_left_out(&p.name) || of_base && trains(*i) || of_model)
        };
        self.missing = used.filter(lacks).map(|(_, p)| format!("`{}`", p.name)).collect();
    }

    /// Records all parameters as missing if the files have none, nor say that they leave them out.
    fn nothing(&mut self, plan: &Plan) {
        let is_adapter = !self.left_out.is_empty() || self.has_adapter;
        if is_adapter
            || !(self.all.is_empty() && self.misfits.is_empty() && self.missing.is_empty())
        {
            return;
        }
        let used = plan.params.iter().filter(|p| p.home != ParamHome::Unused);
        self.missing = used.map(|p| format!("`{}`", p.name)).collect();
    }

    fn refuse(&mut self, path: &Path) -> Result<(), RunError> {
        self.unknown.sort();
        let misfits: Vec<String> = self.misfits.values().cloned().collect();
        let kinds = [
            ("missing", &self.missing),
            ("of another type", &misfits),
            ("unknown to the plan", &self.unknown),
        ];
        let found: Vec<String> = kinds
            .iter()
            .filter(|(_, of)| !of.is_empty())
            .map(|(what, of)| listed(what, of))
            .collect();
        if found.is_empty() {
            let (all, values): (Vec<String>, Vec<f64>) = self.not_finite.values().cloned().unzip();
            if all.is_empty() {
                return Ok(());
            }
            let masks = first_values::of_masks(values);
            let reason = format!("{}; give finite weights{masks}", listed("not finite", &all));
            return Err(RunError::data(path, reason));
        }
        let help = "the files must contain the parameters of the plan under the names that --save writes, \
             or all below one other prefix";
        Err(RunError::data(path, format!("{}; {help}", found.join("; "))))
    }
}

/// `2 missing: a, b`.
fn listed(what: &str, names: &[String]) -> String {
    let shown = names[..names.len().min(LISTED)].join(", ");
    let more = names.len().saturating_sub(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{} {what}: {shown}{more}", names.len())
}

/// The little-endian elements of a stored tensor in the plan's type; `None` if its type does not fit.
fn widened(dtype: Dtype, shape: &[usize], bytes: &[u8], wanted: &TensorType) -> Option<Vec<u8>> {
    if shape != wanted.shape.dims() {
        return None;
    }
    let stored = match dtype {
        dtype if dtype == save::safetensors_dtype(wanted.dtype) => wanted.dtype,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        _ => return None,
    };
    if stored != wanted.dtype && wanted.dtype != DType::F32 {
        return None;
    }
    converted(bytes, stored, wanted.dtype).map(std::borrow::Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_told_from_parameters() {
        let floats =
            |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let is =
            |name: &str, dtype, shape: &[usize], bytes: &[u8]| is_buffer(name, dtype, shape, bytes);
        assert!(is("bert.embeddings.position_ids", Dtype::I64, &[1, 2], &[0; 16]));
        assert!(is("bn1.num_batches_tracked", Dtype::I64, &[], &[0; 8]));
        assert!(is("layers.0.rotary_emb.inv_freq", Dtype::F32, &[1], &floats(&[1.0])));
        let square = |values: &[f32]| is("a.bias", Dtype::F32, &[1, 2, 2], &floats(values));
        assert!(square(&[1.0, 0.0, 1.0, 1.0]));
        assert!(!square(&[1.0, 0.0, 1.0, 2.0]) && !square(&[0.0; 4]) && !square(&[1.0; 4]));
        assert!(is("mask", Dtype::BF16, &[2, 2], &[128, 63, 0, 0, 128, 63, 128, 63]));
        let one = floats(&[1.0]);
        assert!(!is("scale", Dtype::F32, &[], &one) && !is("scale", Dtype::F32, &[1, 1], &one));
        assert!(!is("weight", Dtype::F32, &[0, 0], &[]));
        let two = floats(&[1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]);
        assert!(!is("weight", Dtype::F32, &[2, 2, 2], &two));
    }
}
