//! Exports the model with trained weights from the copy in the plan, in inference mode or unchanged.
//!
//! Unchanged parts stay byte-identical. A model above the size limit of protobuf has its weights in a separate file.

mod adapter;
mod file;
mod inference;
mod message;
mod restored;
mod trained;

pub use adapter::peft;
pub use trained::Trained;

use crate::diagnostics::Report;
use crate::import;
use crate::import::mapped::{self, Folder};
use crate::import::onnx::messages::{NodeProto, OperatorSetIdProto, TensorProto};
use crate::source::Origin;
use crate::wire;
use file::Beside;
use frit_ir::plan::{layout, sha256_hex};
use frit_ir::{Code, Diagnostic};
use frit_passes::adapter::{Adapted, names as matrices_of};
use inference::{Change, Edit, Remaining, Scope};
use message::{Elements, Merge, Message, Piece};
use prost::Message as _;
use prost::bytes::{Buf, Bytes};
use restored::Restored;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// The largest message that Protocol Buffers allow.
const LARGEST: u64 = i32::MAX as u64;
/// Smaller tensors stay in the model in any case.
const SMALLEST_BESIDE: u64 = 1 << 10;
/// Stored integers with more elements are not axes.
const MAX_AXES: usize = 8;

/// Options of an export.
#[derive(Clone, Debug)]
pub struct Options {
    /// Leave the graph as it was trained, instead of in inference mode.
    pub training: bool,
    /// Put weights into a file beside the model even if they fit into it.
    pub external_data: bool,
    /// Where the model is that the plan was compiled from.
    pub model: Option<PathBuf>,
    /// Size in bytes up to which the model may be one file.
    pub largest: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { training: false, external_data: false, model: None, largest: LARGEST }
    }
}

/// What was written.
#[derive(Debug)]
pub struct Written {
    /// The files; the model is the last.
    pub files: Vec<PathBuf>,
    /// What the user should know.
    pub warnings: Vec<Diagnostic>,
}

/// Why the model cannot be reconstructed.
enum Fault {
    /// This tensor is only in the model that the plan was compiled from.
    LeftOut(String),
    /// Anything else.
    Refused(Diagnostic),
}

impl From<Diagnostic> for Fault {
    fn from(diagnostic: Diagnostic) -> Self {
        Fault::Refused(diagnostic)
    }
}

/// Writes the ONNX model that a plan was compiled from, with trained weights.
///
/// # Errors
/// If the model is no ONNX file, does not store a parameter as it was trained, or needs data that are only in a file that
/// is gone or was changed.
pub fn onnx(trained: &Trained, options: &Options, path: &Path) -> Result<Written, Report> {
    let origin = Origin::read(&trained.source)?;
    let is_json = origin.path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json"));
    if is_json || trained.source.join(layout::JSON_MODEL).exists() {
        return Err(Diagnostic::error(
            Code::ExportSource,
            "the plan was compiled from a JSON model",
        )
        .help("use the weights file as it is")
        .into());
    }
    // The model's own weights have no adapters, which begin as nothing.
    let matrices: HashSet<String> = origin.matrices().collect();
    let adapts = matrices.iter().any(|name| trained.ty(name).is_some());
    let lacks =
        |name: &&String| trained.ty(name).is_none() && (adapts || !matrices.contains(*name));
    let missing: Vec<&String> = trained.names.iter().filter(lacks).collect();
    if !missing.is_empty() {
        return Err(trained.lacks(&missing).into());
    }
    trained.check_others()?;
    let from = |model: PathBuf, folder: Option<Folder>| {
        let base = mapped::map(&model).map_err(|e| {
            Diagnostic::error(Code::ExportSource, format!("{}: {e}", model.display()))
        })?;
        let refuse = |report: Report| {
            Diagnostic::error(Code::ExportSource, format!("{}: {report}", model.display()))
        };
        // The plan's own copy is ONNX already.
        let base = match &folder {
            Some(_) => import::as_onnx(base, &model).map_err(refuse)?,
            None => base,
        };
        Base { path: model, bytes: base, folder }.export(trained, &origin, options, path)
    };
    let original = |given: Option<&Path>| {
        let model = origin.model(&trained.source, given)?;
        // Whatever is read there must have its digest.
        let folder = Folder::of(&model, true);
        from(model, Some(folder))
    };
    let kept = trained.source.join(layout::ONNX_MODEL);
    let written = match &options.model {
        Some(given) => original(Some(given)),
        None => from(kept, None).or_else(|fault| match fault {
            Fault::LeftOut(tensor) => original(None).map_err(|fault| match fault {
                Fault::Refused(d) => Fault::Refused(d.note(format!(
                    "the plan does not store `{tensor}`, which is not a parameter and is larger \
                     than 1 MiB"
                ))),
                fault => fault,
            }),
            fault => Err(fault),
        }),
    };
    written.map_err(|fault| match fault {
        Fault::Refused(diagnostic) => diagnostic.into(),
        Fault::LeftOut(tensor) => Diagnostic::error(
            Code::ExportSource,
            format!("the data of `{tensor}` is not available"),
        )
        .into(),
    })
}

/// The model that is changed.
struct Base {
    path: PathBuf,
    bytes: Bytes,
    /// Where files beside it are, if it lies where it was compiled.
    folder: Option<Folder>,
}

impl Base {
    fn export(
        &self,
        trained: &Trained,
        origin: &Origin,
        options: &Options,
        path: &Path,
    ) -> Result<Written, Fault> {
        let merged = import::onnx::merged(self.bytes.clone());
        let is_trained =
            |name: &str| trained.ty(name).is_some() || adapter_of(origin, trained, name).is_some();
        let restored = Restored::of(self.bytes.clone(), is_trained);
        let matrices: HashSet<String> = origin.matrices().collect();
        let beside = || {
            let mut name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name += ".data";
            Beside::new(name)
        };
        let start = |beside: Option<Beside>| Export {
            base: self,
            trained,
            origin,
            merged: &merged,
            restored: &restored,
            training: options.training,
            left: trained.names.iter().filter(|n| !matrices.contains(*n)).cloned().collect(),
            beside,
            remaining: Remaining::default(),
        };
        let mut export = start(options.external_data.then(beside));
        let mut model = export.model()?;
        if model.len() > options.largest && export.beside.is_none() {
            export = start(Some(beside()));
            model = export.model()?;
        }
        if let Some(name) = export.left.first() {
            let what =
                format!("no initializer is named `{name}`, nor {} others", export.left.len() - 1);
            return Err(self
                .refuse(what)
                .note("the exporter's optimization renamed or merged them")
                .help("export the model without optimization, or use the weights file as it is")
                .into());
        }
        if model.len() > options.largest {
            let what = "without its weights it is larger than 2 GiB".into();
            return Err(self
                .refuse(what)
                .help("load the weights file into the original module instead")
                .into());
        }
        let files = file::write(path, &model, export.beside.as_ref(), trained)?;
        Ok(Written { files, warnings: export.remaining.warnings() })
    }

    fn refuse(&self, what: String) -> Diagnostic {
        Diagnostic::error(Code::ExportModel, format!("{}: {what}", self.path.display()))
    }

    /// The fields of a message of the model.
    fn fields<'m>(&self, message: &'m Bytes) -> Result<Vec<wire::Field<'m>>, Fault> {
        let broken = || self.refuse("it is not an ONNX model".into());
        Ok(wire::fields(message).ok_or_else(broken)?)
    }

    /// A part of the model as a message.
    fn decode<M: prost::Message + Default>(&self, bytes: impl Buf) -> Result<M, Fault> {
        M::decode(bytes).map_err(|e| self.refuse(e.to_string()).into())
    }
}

/// A model on its way.
struct Export<'a> {
    base: &'a Base,
    trained: &'a Trained,
    origin: &'a Origin,
    /// Parameters that the exporter stored as copies of another, each with that other's name.
    merged: &'a [(String, String)],
    restored: &'a Restored,
    training: bool,
    /// Parameters that no initializer was found for yet.
    left: BTreeSet<String>,
    beside: Option<Beside>,
    remaining: Remaining,
}

/// The parent of a graph or function.
#[derive(Clone, Default)]
struct Around {
    /// Names of tensors that the model stores.
    stored: HashSet<String>,
    /// Small stored integers.
    integers: HashMap<String, Vec<i64>>,
    /// Stored tensors of one element.
    numbers: HashSet<String>,
    opset: i64,
}

impl Export<'_> {
    fn model(&mut self) -> Result<Message, Fault> {
        let bytes = &self.base.bytes;
        let fields = self.base.fields(bytes)?;
        let opset = self.opset(&fields, 8)?.unwrap_or(1);
        let mut out = Message::default();
        for field in fields {
            match (field.number, field.content) {
                (7, Some(graph)) => {
                    let merged = self.merged.iter().map(|(name, _)| name);
                    let added = self.restored.added.keys().chain(self.restored.packed.keys());
                    let stored = merged.chain(added).cloned().collect();
                    let around = Around { stored, opset, ..Around::default() };
                    let graph = self.graph(bytes.slice_ref(graph), &around, true)?;
                    out.put_message(7, graph);
                }
                (25, Some(function)) if !self.training => {
                    let function = self.function(bytes.slice_ref(function), opset)?;
                    out.put_message(25, function);
                }
                _ => out.put_fields(bytes.slice_ref(field.whole)),
            }
        }
        Ok(out)
    }

    /// The version of ONNX's own operators, said in fields of this number.
    fn opset(&self, fields: &[wire::Field<'_>], number: u64) -> Result<Option<i64>, Fault> {
        for content in fields.iter().filter(|f| f.number == number).filter_map(|f| f.content) {
            let set: OperatorSetIdProto = self.base.decode(content)?;
            if matches!(set.domain.as_str(), "" | "ai.onnx") {
                return Ok(Some(set.version));
            }
        }
        Ok(None)
    }

    /// A function of the model, whose inputs count as stored.
    fn function(&mut self, bytes: Bytes, opset: i64) -> Result<Message, Fault> {
        let fields = self.base.fields(&bytes)?;
        let opset = self.opset(&fields, 9)?.unwrap_or(opset);
        let around = Around { stored: texts(&fields, 4), opset, ..Around::default() };
        let mut out = Message::default();
        let edits = self.edits(&fields, 7, texts(&fields, 5), &around, &Restored::default())?;
        let mut place = 0;
        for field in &fields {
            match (field.number, field.content) {
                (7, Some(node)) => {
                    let edit = edits.get(&place);
                    self.node(bytes.slice_ref(node), (7, &[]), edit, &around, &mut out)?;
                    place += 1;
                }
                _ => out.put_fields(bytes.slice_ref(field.whole)),
            }
        }
        Ok(out)
    }

    /// What becomes of the nodes in fields of this number.
    fn edits(
        &mut self,
        fields: &[wire::Field<'_>],
        number: u64,
        outputs: HashSet<String>,
        around: &Around,
        restored: &Restored,
    ) -> Result<HashMap<usize, Edit>, Fault> {
        if self.training {
            return Ok(HashMap::new());
        }
        let nodes = fields.iter().filter(|f| f.number == number).filter_map(|f| f.content);
        let nodes: Result<Vec<NodeProto>, Fault> = nodes.map(|n| self.base.decode(n)).collect();
        let mut nodes = nodes?;
        nodes.iter_mut().enumerate().for_each(|(place, node)| restored.rename(place, node));
        let Around { stored, integers, numbers, opset } = around;
        let scope = Scope::new(&nodes, outputs, stored, integers, numbers, *opset);
        Ok(scope.edits(&mut self.remaining))
    }

    /// A graph. In the model's own (`main`) initializers are replaced, those that were merged stand beside the one
    /// that they are copies of, and those of restored parameters behind all others.
    fn graph(&mut self, bytes: Bytes, around: &Around, main: bool) -> Result<Message, Fault> {
        let fields = self.base.fields(&bytes)?;
        let mut around = around.clone();
        for tensor in fields.iter().filter(|f| f.number == 5).filter_map(|f| f.content) {
            around.stored.extend(wire::text(tensor, 8));
            if tensor.len() < SMALLEST_BESIDE as usize {
                let tensor: TensorProto = self.base.decode(tensor)?;
                around.integers.extend(integers(&tensor));
                if tensor.dims.iter().all(|n| *n == 1) {
                    around.numbers.insert(tensor.name);
                }
            }
        }
        let outputs = fields.iter().filter(|f| f.number == 12).filter_map(|f| f.content);
        let outputs = outputs.filter_map(|info| wire::text(info, 1)).collect();
        let none = Restored::default();
        let restored = if main { self.restored } else { &none };
        let edits = self.edits(&fields, 1, outputs, &around, restored)?;
        let (mut out, mut place) = (Message::default(), 0);
        let mut tensors = HashMap::new();
        for field in &fields {
            match (field.number, field.content) {
                (1, Some(node)) => {
                    // Its second field names its results.
                    let made = wire::text(node, 2).unwrap_or_default();
                    if !main || self.merged.iter().all(|(name, _)| *name != made) {
                        let edit = edits.get(&place);
                        let names = restored.operands.get(&place).map_or(&[][..], Vec::as_slice);
                        self.node(bytes.slice_ref(node), (1, names), edit, &around, &mut out)?;
                    }
                    for copy in restored.copies.get(&place).into_iter().flatten() {
                        out.put(1, &copy.encode_to_vec());
                    }
                    place += 1;
                }
                (5, Some(tensor)) if main => {
                    let own = wire::text(tensor, 8).unwrap_or_default();
                    tensors.insert(own.clone(), bytes.slice_ref(tensor));
                    for (name, _) in restored.constants.iter().filter(|(_, of)| **of == own) {
                        let stored: TensorProto = self.base.decode(bytes.slice_ref(tensor))?;
                        let data =
                            import::onnx::elements(&stored).map_err(|e| self.base.refuse(e))?;
                        let dtype = stored.data_type as u64;
                        out.put_message(
                            5,
                            self.tensor(&stored.dims, dtype, name, Piece::Bytes(data)),
                        );
                    }
                    if restored.dropped.contains(&own) {
                        continue;
                    }
                    let copies = self.merged.iter().filter(|(_, source)| *source == own);
                    let names: Vec<&String> =
                        std::iter::once(&own).chain(copies.map(|(name, _)| name)).collect();
                    for name in names {
                        let tensor = self.initializer(bytes.slice_ref(tensor), name)?;
                        out.put_message(5, tensor);
                    }
                }
                (5, Some(tensor)) => {
                    let name = wire::text(tensor, 8).unwrap_or_default();
                    out.put_message(5, self.stored(bytes.slice_ref(tensor), &name, false)?);
                }
                _ => out.put_fields(bytes.slice_ref(field.whole)),
            }
        }
        for (name, added) in &restored.added {
            out.put_message(5, self.added(name, added, &tensors)?);
        }
        for (name, (packed, dtype)) in &restored.packed {
            out.put_message(5, self.packed(name, packed, *dtype)?);
        }
        Ok(out)
    }

    /// Appends a node as a field of this number, or what takes its place, with other names of operands.
    fn node(
        &mut self,
        bytes: Bytes,
        (number, names): (u64, &[(usize, String)]),
        edit: Option<&Edit>,
        around: &Around,
        out: &mut Message,
    ) -> Result<(), Fault> {
        let whole =
            Change { inputs: usize::MAX, outputs: usize::MAX, attribute: None, after: vec![] };
        let change = match edit {
            Some(Edit::Drop) => return Ok(()),
            Some(Edit::Instead(nodes)) => {
                nodes.iter().for_each(|node| out.put(number, &node.encode_to_vec()));
                return Ok(());
            }
            Some(Edit::Change(change)) => change,
            None => &whole,
        };
        let replaced = change.attribute.as_ref().map(|a| a.name.as_str());
        let (mut node, mut inputs, mut outputs) = (Message::default(), 0, 0);
        for field in self.base.fields(&bytes)? {
            let name = names.iter().find(|(operand, _)| *operand == inputs);
            match (field.number, field.content, name) {
                (1, ..) if inputs >= change.inputs => {}
                (1, _, Some((_, name))) => node.put(1, name.as_bytes()),
                (2, ..) if outputs >= change.outputs => {}
                (5, Some(attribute), _) => {
                    let name = wire::text(attribute, 1);
                    if name.is_none() || name.as_deref() != replaced {
                        let attribute = self.attribute(bytes.slice_ref(attribute), around)?;
                        node.put_message(5, attribute);
                    }
                }
                _ => node.put_fields(bytes.slice_ref(field.whole)),
            }
            inputs += usize::from(field.number == 1);
            outputs += usize::from(field.number == 2);
        }
        let appended = names.iter().filter(|(operand, _)| *operand >= inputs);
        for (_, name) in appended.filter(|_| inputs < change.inputs) {
            node.put(1, name.as_bytes());
        }
        if let Some(attribute) = &change.attribute {
            node.put(5, &attribute.encode_to_vec());
        }
        out.put_message(number, node);
        change.after.iter().for_each(|node| out.put(number, &node.encode_to_vec()));
        Ok(())
    }

    /// An attribute with the graphs inside it.
    fn attribute(&mut self, bytes: Bytes, around: &Around) -> Result<Message, Fault> {
        let mut out = Message::default();
        for field in self.base.fields(&bytes)? {
            match (field.number, field.content) {
                (number @ (6 | 11), Some(graph)) => {
                    out.put_message(number, self.graph(bytes.slice_ref(graph), around, false)?);
                }
                (number @ (5 | 10), Some(tensor)) => {
                    let name = wire::text(tensor, 8).unwrap_or_default();
                    out.put_message(number, self.stored(bytes.slice_ref(tensor), &name, false)?);
                }
                _ => out.put_fields(bytes.slice_ref(field.whole)),
            }
        }
        Ok(out)
    }

    /// The initializer under this name, with its trained data if it is a parameter.
    fn initializer(&mut self, bytes: Bytes, name: &str) -> Result<Message, Fault> {
        let tied = self.origin.ties.get(name);
        let parameter = tied.map_or(name, |t| &t.parameter);
        let adapter = adapter_of(self.origin, self.trained, parameter);
        let Some((dtype, shape)) = self.trained.ty(parameter) else {
            return match adapter {
                None => self.stored(bytes, name, true),
                Some(adapter) => {
                    let out_first = adapter.out_first != tied.is_some_and(|t| t.transposed);
                    let adapter = Adapted { out_first, ..adapter };
                    self.adapted(&bytes, (name, parameter), adapter)
                }
            };
        };
        // Its data may be large, and are not needed: fields that are length-delimited, but for the sizes.
        let small = self.base.fields(&bytes)?.into_iter().filter(|f| f.number <= 2);
        let tensor: TensorProto =
            self.base.decode(&small.flat_map(|f| f.whole).copied().collect::<Vec<u8>>()[..])?;
        let mut shape = shape.to_vec();
        let transposed = tied.is_some_and(|t| t.transposed);
        if transposed {
            shape.reverse();
        }
        if !shape.iter().map(|n| *n as i64).eq(tensor.dims.iter().copied()) {
            let what = format!(
                "{} holds `{parameter}` of shape {shape:?}, and the model has {:?}",
                self.trained.path().display(),
                tensor.dims
            );
            let help = "give weights of this model";
            return Err(Diagnostic::error(Code::ExportWeights, what).help(help).into());
        }
        let onnx = tensor.data_type as u64;
        let Some(size) = trained::stored_size(dtype, onnx) else {
            return Err(self.base.refuse(format!("`{name}` is not stored as floats")).into());
        };
        let elements = shape.iter().map(|n| *n as u64).product::<u64>();
        self.left.remove(name);
        if transposed {
            shape.reverse();
        }
        let data = Elements {
            parameter: parameter.into(),
            transposed,
            dtype: onnx,
            bytes: elements * size,
            adapter: adapter.and_then(|a| merge(&shape, a, None)),
        };
        Ok(self.tensor(&tensor.dims, onnx, name, Piece::Elements(data)))
    }

    /// The initializer of a weight that is the model's own, with its adapter.
    fn adapted(
        &mut self,
        bytes: &Bytes,
        (name, parameter): (&str, &str),
        adapter: Adapted,
    ) -> Result<Message, Fault> {
        let tensor: TensorProto = self.base.decode(bytes.clone())?;
        if is_left_out(&tensor) {
            return Err(Fault::LeftOut(name.into()));
        }
        let stored = match tensor.data_location {
            1 => self.beside(bytes, name)?,
            _ => import::onnx::elements(&tensor).map_err(|e| self.base.refuse(e))?,
        };
        let shape: Vec<usize> = tensor.dims.iter().map(|n| *n as usize).collect();
        let dtype = tensor.data_type as u64;
        let data = Elements {
            parameter: parameter.into(),
            transposed: false,
            dtype,
            bytes: stored.len() as u64,
            adapter: merge(&shape, adapter, Some((stored, dtype))),
        };
        Ok(self.tensor(&tensor.dims, dtype, name, Piece::Elements(data)))
    }

    /// A tensor that is no parameter, as the model stores it; what `moves` goes where large data go.
    fn stored(&mut self, bytes: Bytes, name: &str, moves: bool) -> Result<Message, Fault> {
        let tensor: TensorProto = self.base.decode(bytes.clone())?;
        let (dims, dtype) = (tensor.dims.clone(), tensor.data_type as u64);
        if is_left_out(&tensor) {
            return Err(Fault::LeftOut(name.into()));
        }
        if tensor.data_location == 1 {
            let data = self.beside(&bytes, name)?;
            if moves {
                return Ok(self.tensor(&dims, dtype, name, Piece::Bytes(data)));
            }
            let mut out = Message::default();
            let inside = wire::embedded(&bytes, &data).unwrap_or_default();
            out.put_fields(inside.into());
            return Ok(out);
        }
        let large = |data: &Bytes| data.len() as u64 > SMALLEST_BESIDE;
        match tensor.raw_data {
            Some(data) if moves && self.beside.is_some() && large(&data) => {
                Ok(self.tensor(&dims, dtype, name, Piece::Bytes(data)))
            }
            _ => {
                let mut out = Message::default();
                out.put_fields(bytes);
                // The last occurrence of a field counts.
                if tensor.name != name {
                    out.put(8, name.as_bytes());
                }
                Ok(out)
            }
        }
    }

    /// The data of a tensor in a file beside the model, as they were when the plan was compiled.
    fn beside(&self, tensor: &[u8], name: &str) -> Result<Bytes, Fault> {
        let Some(folder) = &self.base.folder else { return Err(Fault::LeftOut(name.into())) };
        let data = import::onnx::external_data(tensor, folder);
        let data = data
            .unwrap_or(Ok(Bytes::new()))
            .map_err(|e| self.base.refuse(format!("the data of `{name}` cannot be read: {e}")))?;
        let is_known = match self.origin.digests.get(name) {
            Some(digest) => *digest == sha256_hex(&data),
            // That of a parameter is known to the file that leaves it out.
            None => {
                let dtype = self.base.decode::<TensorProto>(tensor)?.data_type;
                self.trained.left_out_is(name, dtype as u64, &data)
            }
        };
        if !is_known {
            let what = format!("the data of `{name}` were changed since the plan was compiled");
            return Err(self.base.refuse(what).into());
        }
        Ok(data)
    }

    /// An initializer with its data inside it, or beside the model if they go there and are large.
    fn tensor(&mut self, dims: &[i64], dtype: u64, name: &str, data: Piece) -> Message {
        let mut out = Message::default();
        dims.iter().for_each(|n| out.put_integer(1, *n as u64));
        out.put_integer(2, dtype);
        out.put(8, name.as_bytes());
        match &mut self.beside {
            Some(beside) if data.len() > SMALLEST_BESIDE => {
                let length = data.len();
                let offset = beside.put(data);
                let entry = |key: &str, value: &str| {
                    let mut entry = Vec::new();
                    wire::put(&mut entry, 1, key.as_bytes());
                    wire::put(&mut entry, 2, value.as_bytes());
                    entry
                };
                out.put(13, &entry("location", &beside.file));
                out.put(13, &entry("offset", &offset.to_string()));
                out.put(13, &entry("length", &length.to_string()));
                out.put_integer(14, 1);
            }
            _ => out.put_piece(9, data),
        }
        out
    }
}

/// The adapter of a parameter, if its matrices were trained.
fn adapter_of(origin: &Origin, trained: &Trained, parameter: &str) -> Option<Adapted> {
    let adapter = origin.adapters.get(parameter)?;
    let are_trained = matrices_of(parameter).iter().all(|matrix| trained.ty(matrix).is_some());
    are_trained.then_some(*adapter)
}

/// The adapter of a matrix of this shape.
fn merge(shape: &[usize], adapter: Adapted, base: Option<(Bytes, u64)>) -> Option<Merge> {
    let &[rows, columns] = shape else { return None };
    let Adapted { out_first, scale } = adapter;
    Some(Merge { base, shape: [rows, columns], out_first, scale: scale.to_bits() })
}

/// The texts in fields of this number.
fn texts(fields: &[wire::Field<'_>], number: u64) -> HashSet<String> {
    let contents = fields.iter().filter(|f| f.number == number).filter_map(|f| f.content);
    contents.map(|text| String::from_utf8_lossy(text).into_owned()).collect()
}

/// Whether a plan left the data of the tensor out.
fn is_left_out(tensor: &TensorProto) -> bool {
    let empty = tensor.dims.contains(&0);
    let typed = [
        tensor.float_data.len(),
        tensor.int32_data.len(),
        tensor.int64_data.len(),
        tensor.double_data.len(),
        tensor.uint64_data.len(),
    ];
    // Texts are never left out, as they are many small fields.
    let text = tensor.data_type == 8;
    let inside = tensor.raw_data.is_some() || typed.iter().any(|n| *n > 0);
    !(empty || text || inside || tensor.data_location == 1)
}

/// The name and elements of a tensor of few 64-bit integers.
fn integers(tensor: &TensorProto) -> Option<(String, Vec<i64>)> {
    if tensor.data_type != 7 {
        return None;
    }
    let values: Vec<i64> = match &tensor.raw_data {
        Some(raw) => raw.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        None => tensor.int64_data.clone(),
    };
    (values.len() <= MAX_AXES).then(|| (tensor.name.clone(), values))
}
