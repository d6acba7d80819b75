//! One ATen call while it is rewritten: its arguments, and the ONNX nodes that take its place.

use super::dtype::{self, BF16, BOOL, Dtype, F16, F32, F64, I64, Weight};
use super::schema::{Argument, Node, OptionalTensor, SymInt};
use super::translate::{Int, Tensor, Value};
use crate::import::onnx::messages::{
    AttributeProto, NodeProto, StringStringEntryProto, TensorProto,
};
use half::{bf16, f16};
use prost::bytes::Bytes;
use std::collections::{HashMap, HashSet};

/// Why a call cannot be rewritten.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// An operand could not be computed.
    Upstream,
    /// An argument has a value that is not supported.
    Unsupported(String),
    /// The archive contradicts the operator's schema.
    Damaged(String),
    /// A value that nothing defines.
    Undefined(String),
}

/// The values of a call's results, by their ONNX names.
pub(super) type Outcome = Result<Vec<String>, Fault>;

pub(super) fn unsupported<T>(what: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Unsupported(what.into()))
}

/// A number of the program.
#[derive(Clone, Debug)]
pub(super) enum Scalar {
    Int(i64),
    Float(f64),
    Bool(bool),
    /// A size that is computed.
    Size(String),
}

impl Scalar {
    pub(super) fn dtype(&self) -> Dtype {
        match self {
            Scalar::Int(_) | Scalar::Size(_) => I64,
            Scalar::Float(_) => F32,
            Scalar::Bool(_) => BOOL,
        }
    }

    /// The number, if it is known.
    pub(super) fn value(&self) -> Option<f64> {
        match self {
            Scalar::Int(n) => Some(*n as f64),
            Scalar::Float(x) => Some(*x),
            Scalar::Bool(b) => Some(f64::from(u8::from(*b))),
            Scalar::Size(_) => None,
        }
    }
}

/// An operand that is a tensor or a number.
#[derive(Clone, Debug)]
pub(super) enum Operand {
    Tensor(Tensor),
    Number(Scalar),
}

impl Operand {
    pub(super) fn weighted(&self) -> (Dtype, Weight) {
        match self {
            Operand::Tensor(t) if t.dims.is_empty() => (t.dtype, Weight::Scalar),
            Operand::Tensor(t) => (t.dtype, Weight::Tensor),
            Operand::Number(n) => (n.dtype(), Weight::Number),
        }
    }
}

/// The elements of axes of these sizes, if they are known and can be counted.
pub(super) fn numel(dims: &[Option<i64>]) -> Option<i64> {
    dims.iter().try_fold(1i64, |n, size| n.checked_mul((*size)?))
}

/// Coordinates that a call is written with; more are an error.
pub(super) const MAX_PLACES: i64 = 1 << 24;

/// One call.
pub(super) struct Call<'a> {
    /// The operator without its overload, and the overload.
    pub(super) op: &'a str,
    pub(super) overload: &'a str,
    pub(super) node: &'a Node,
    pub(super) values: &'a HashMap<String, Value>,
    pub(super) names: &'a mut HashSet<String>,
    /// What takes the place of the call.
    pub(super) made: Vec<NodeProto>,
}

impl Call<'_> {
    pub(super) fn argument(&self, name: &str) -> Option<&Argument> {
        let found = self.node.inputs.iter().find(|i| i.name == name).map(|i| &i.arg);
        found.filter(|a| !matches!(a, Argument::AsNone(_)))
    }

    fn missing<T>(&self, name: &str) -> Result<T, Fault> {
        Err(Fault::Damaged(format!("{} has no argument `{name}`, or one of another kind", self.op)))
    }

    pub(super) fn value(&self, name: &str) -> Result<&Value, Fault> {
        self.values.get(name).ok_or_else(|| Fault::Undefined(name.into()))
    }

    fn named(&self, name: &str) -> Result<Tensor, Fault> {
        match self.value(name)? {
            Value::Tensor(tensor) => Ok(tensor.clone()),
            Value::Failed => Err(Fault::Upstream),
            Value::Omitted => unsupported(format!("reading `{name}`, not the first result,")),
            Value::Renewed(_) => {
                unsupported(format!("reading `{name}`, a running statistic after its renewal,"))
            }
            Value::Int(_) => Err(Fault::Damaged(format!("`{name}` is a number, not a tensor"))),
        }
    }

    /// The tensor in an argument.
    pub(super) fn tensor(&self, name: &str) -> Result<Tensor, Fault> {
        match self.optional(name)? {
            Some(tensor) => Ok(tensor),
            None => self.missing(name),
        }
    }

    /// The tensor in an argument that may be left out.
    pub(super) fn optional(&self, name: &str) -> Result<Option<Tensor>, Fault> {
        match self.argument(name) {
            None => Ok(None),
            Some(Argument::AsTensor(t)) => self.named(&t.name).map(Some),
            Some(Argument::AsOptionalTensor(OptionalTensor::AsTensor(t))) => {
                self.named(&t.name).map(Some)
            }
            Some(Argument::AsOptionalTensor(OptionalTensor::AsNone(_))) => Ok(None),
            Some(_) => self.missing(name),
        }
    }

    /// The tensors in a list.
    pub(super) fn tensors(&self, name: &str) -> Result<Vec<Tensor>, Fault> {
        match self.argument(name) {
            Some(Argument::AsTensors(list)) => list.iter().map(|t| self.named(&t.name)).collect(),
            _ => self.missing(name),
        }
    }

    /// The tensors in a list, some of which are left out.
    pub(super) fn optionals(&self, name: &str) -> Result<Vec<Option<Tensor>>, Fault> {
        let of = |t: &OptionalTensor| match t {
            OptionalTensor::AsTensor(t) => self.named(&t.name).map(Some),
            OptionalTensor::AsNone(_) => Ok(None),
        };
        match self.argument(name) {
            Some(Argument::AsOptionalTensors(list)) => list.iter().map(of).collect(),
            _ => Ok(self.tensors(name)?.into_iter().map(Some).collect()),
        }
    }

    /// A tensor, or a number.
    pub(super) fn operand(&self, name: &str) -> Result<Operand, Fault> {
        match self.argument(name) {
            Some(Argument::AsTensor(_) | Argument::AsOptionalTensor(_)) => {
                self.tensor(name).map(Operand::Tensor)
            }
            _ => match self.scalar(name)? {
                Some(number) => Ok(Operand::Number(number)),
                None => self.missing(name),
            },
        }
    }

    /// A number.
    pub(super) fn scalar(&self, name: &str) -> Result<Option<Scalar>, Fault> {
        Ok(Some(match self.argument(name) {
            None => return Ok(None),
            Some(Argument::AsInt(n)) => Scalar::Int(*n),
            Some(Argument::AsFloat(x)) => Scalar::Float(x.0),
            Some(Argument::AsBool(b)) => Scalar::Bool(*b),
            Some(Argument::AsSymInt(size)) => match self.size(size)? {
                Int::Known(n) => Scalar::Int(n),
                Int::Computed(name) => Scalar::Size(name),
            },
            Some(_) => return self.missing(name),
        }))
    }

    /// A number that is known.
    pub(super) fn float(&self, name: &str, default: f64) -> Result<f64, Fault> {
        match self.scalar(name)? {
            None => Ok(default),
            Some(number) => match number.value() {
                Some(x) => Ok(x),
                None => unsupported(format!("`{name}` that is a dynamic size")),
            },
        }
    }

    /// A number that is known, if it is given.
    pub(super) fn float_given(&self, name: &str) -> Result<Option<f64>, Fault> {
        if self.argument(name).is_some() { self.float(name, 0.0).map(Some) } else { Ok(None) }
    }

    pub(super) fn bool(&self, name: &str, default: bool) -> Result<bool, Fault> {
        match self.argument(name) {
            None => Ok(default),
            Some(Argument::AsBool(b)) => Ok(*b),
            Some(Argument::AsInt(n)) => Ok(*n != 0),
            Some(_) => self.missing(name),
        }
    }

    pub(super) fn text(&self, name: &str, default: &str) -> Result<String, Fault> {
        match self.argument(name) {
            None => Ok(default.into()),
            Some(Argument::AsString(text)) => Ok(text.clone()),
            Some(_) => self.missing(name),
        }
    }

    /// The element type in an argument.
    pub(super) fn dtype(&self, name: &str) -> Result<Option<Dtype>, Fault> {
        match self.argument(name) {
            None => Ok(None),
            Some(Argument::AsScalarType(n)) => match dtype::of_torch(*n) {
                Some(dtype) => Ok(Some(dtype)),
                None => unsupported(format!("the element type number {n}")),
            },
            Some(_) => self.missing(name),
        }
    }

    fn size(&self, size: &SymInt) -> Result<Int, Fault> {
        match size {
            SymInt::AsInt(n) => Ok(Int::Known(*n)),
            SymInt::AsName(name) => match self.value(name)? {
                Value::Int(int) => Ok(int.clone()),
                Value::Failed => Err(Fault::Upstream),
                _ => Err(Fault::Damaged(format!("`{name}` is a tensor, not a size"))),
            },
        }
    }

    /// A size, if it is given.
    pub(super) fn int_given(&self, name: &str) -> Result<Option<Int>, Fault> {
        match self.argument(name) {
            None => Ok(None),
            Some(Argument::AsInt(n)) => Ok(Some(Int::Known(*n))),
            Some(Argument::AsSymInt(size)) => self.size(size).map(Some),
            Some(_) => self.missing(name),
        }
    }

    /// A size that is known.
    pub(super) fn int(&self, name: &str, default: i64) -> Result<i64, Fault> {
        match self.int_given(name)? {
            None => Ok(default),
            Some(Int::Known(n)) => Ok(n),
            Some(Int::Computed(_)) => unsupported(format!("`{name}` that is a dynamic size")),
        }
    }

    /// A list of sizes, or one that stands for a list.
    pub(super) fn sizes(&self, name: &str) -> Result<Option<Vec<Int>>, Fault> {
        Ok(Some(match self.argument(name) {
            None => return Ok(None),
            Some(Argument::AsInts(list)) => list.iter().map(|n| Int::Known(*n)).collect(),
            Some(Argument::AsSymInts(list)) => {
                list.iter().map(|s| self.size(s)).collect::<Result<_, _>>()?
            }
            // An empty list has no elements that would tell its kind.
            Some(Argument::AsTensors(list)) if list.is_empty() => Vec::new(),
            Some(_) => match self.int_given(name)? {
                Some(int) => vec![int],
                None => return self.missing(name),
            },
        }))
    }

    /// A list of sizes that are known.
    pub(super) fn ints(&self, name: &str) -> Result<Option<Vec<i64>>, Fault> {
        let Some(sizes) = self.sizes(name)? else { return Ok(None) };
        let known: Option<Vec<i64>> = sizes.iter().map(Int::known).collect();
        match known {
            Some(known) => Ok(Some(known)),
            None => unsupported(format!("`{name}` of dynamic sizes")),
        }
    }

    /// A list with one entry for each of `n` axes; one entry stands for all.
    pub(super) fn per_axis(&self, name: &str, n: usize, default: i64) -> Result<Vec<i64>, Fault> {
        match self.ints(name)?.unwrap_or_default().as_slice() {
            [] => Ok(vec![default; n]),
            [one] => Ok(vec![*one; n]),
            list if list.len() == n => Ok(list.to_vec()),
            list => {
                Err(Fault::Damaged(format!("`{name}` has {} entries for {n} axes", list.len())))
            }
        }
    }

    /// An axis of `rank`, counted from the front; a tensor without axes counts as one with one.
    pub(super) fn axis(&self, axis: i64, rank: usize) -> Result<usize, Fault> {
        let rank = rank.max(1) as i64;
        let resolved = if axis < 0 { axis.saturating_add(rank) } else { axis };
        match (0..rank).contains(&resolved) {
            true => Ok(resolved as usize),
            false => Err(Fault::Damaged(format!("axis {axis} of a tensor of rank {rank}"))),
        }
    }

    /// The axes in an argument, counted from the front; `None` if none are named.
    pub(super) fn axes(&self, name: &str, rank: usize) -> Result<Option<Vec<i64>>, Fault> {
        let Some(given) = self.ints(name)? else { return Ok(None) };
        let axes: Result<Vec<i64>, _> =
            given.iter().map(|a| self.axis(*a, rank).map(|a| a as i64)).collect();
        axes.map(Some)
    }

    fn fresh(&mut self) -> String {
        let base = self.node.name.as_deref().unwrap_or(self.op);
        let mut i = self.made.len();
        loop {
            let name = format!("{base}/{i}");
            if self.names.insert(name.clone()) {
                return name;
            }
            i += 1;
        }
    }

    /// Adds an ONNX node with `n` results.
    pub(super) fn all(
        &mut self,
        op_type: &str,
        inputs: &[&str],
        attribute: Vec<AttributeProto>,
        n: usize,
    ) -> Vec<String> {
        let output: Vec<String> = (0..n).map(|_| self.fresh()).collect();
        self.made.push(NodeProto {
            input: inputs.iter().map(|i| (*i).to_string()).collect(),
            output: output.clone(),
            op_type: op_type.into(),
            attribute,
            ..NodeProto::default()
        });
        output
    }

    /// Adds an ONNX node with one result and attributes.
    pub(super) fn with(
        &mut self,
        op_type: &str,
        inputs: &[&str],
        attribute: Vec<AttributeProto>,
    ) -> String {
        self.all(op_type, inputs, attribute, 1).remove(0)
    }

    /// Adds an ONNX node with one result.
    pub(super) fn add(&mut self, op_type: &str, inputs: &[&str]) -> String {
        self.with(op_type, inputs, vec![])
    }

    /// Says of the last node which call it came from.
    pub(super) fn note_call(&mut self, call: &str) {
        if let Some(node) = self.made.last_mut() {
            node.metadata_props.push(call_entry(call));
        }
    }

    fn constant(&mut self, tensor: TensorProto) -> String {
        let value = AttributeProto {
            name: "value".into(),
            t: Some(Box::new(tensor)),
            r#type: 4,
            ..AttributeProto::default()
        };
        self.with("Constant", &[], vec![value])
    }

    /// A list of integers.
    pub(super) fn list(&mut self, values: &[i64]) -> String {
        let dims = vec![values.len() as i64];
        self.constant(TensorProto {
            dims,
            data_type: I64,
            int64_data: values.to_vec(),
            ..TensorProto::default()
        })
    }

    /// A matrix of f32.
    pub(super) fn matrix(&mut self, dims: [i64; 2], values: Vec<f32>) -> String {
        self.constant(TensorProto {
            dims: dims.to_vec(),
            data_type: F32,
            float_data: values,
            ..TensorProto::default()
        })
    }

    /// A number in an element type.
    pub(super) fn number(&mut self, dtype: Dtype, value: f64) -> String {
        let mut tensor = scalar(dtype, value);
        tensor.dims.clear();
        self.constant(tensor)
    }

    /// An integer, exactly.
    pub(super) fn integer(&mut self, value: i64) -> String {
        self.constant(TensorProto {
            data_type: I64,
            int64_data: vec![value],
            ..TensorProto::default()
        })
    }

    /// A number of the program in an element type.
    pub(super) fn scalar_as(&mut self, number: &Scalar, dtype: Dtype) -> String {
        match (number, number.value()) {
            (Scalar::Int(n), _) if dtype == I64 => self.integer(*n),
            (_, Some(value)) => self.number(dtype, value),
            (Scalar::Size(name), None) => self.cast(name, I64, dtype),
            _ => self.number(dtype, 0.0),
        }
    }

    /// The value in another element type.
    pub(super) fn cast(&mut self, x: &str, from: Dtype, to: Dtype) -> String {
        if from == to { x.into() } else { self.with("Cast", &[x], vec![int("to", to.into())]) }
    }

    /// An operand in an element type.
    pub(super) fn operand_as(&mut self, operand: &Operand, dtype: Dtype) -> String {
        match operand {
            Operand::Tensor(t) => self.cast(&t.name, t.dtype, dtype),
            Operand::Number(number) => self.scalar_as(number, dtype),
        }
    }

    /// The tensor in an element type of floats: its own, or f32 if it has integers.
    pub(super) fn as_float(&mut self, t: &Tensor) -> (String, Dtype) {
        let dtype = if dtype::is_float(t.dtype) { t.dtype } else { F32 };
        (self.cast(&t.name, t.dtype, dtype), dtype)
    }

    /// A size as a number in the graph.
    pub(super) fn size_scalar(&mut self, size: &Int) -> String {
        match size {
            Int::Known(n) => self.integer(*n),
            Int::Computed(name) => name.clone(),
        }
    }

    /// Sizes as a list in the graph.
    pub(super) fn size_list(&mut self, sizes: &[Int]) -> String {
        let known: Option<Vec<i64>> = sizes.iter().map(Int::known).collect();
        if let Some(known) = known {
            return self.list(&known);
        }
        let zero = self.list(&[0]);
        let parts: Vec<String> = sizes
            .iter()
            .map(|size| match size {
                Int::Known(n) => self.list(&[*n]),
                Int::Computed(name) => self.add("Unsqueeze", &[name, &zero]),
            })
            .collect();
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        self.with("Concat", &parts, vec![int("axis", 0)])
    }

    /// The size of an axis.
    pub(super) fn size_of(&mut self, t: &Tensor, axis: usize) -> Int {
        if let Some(Some(n)) = t.dims.get(axis) {
            return Int::Known(*n);
        }
        let axis = axis as i64;
        let size = self.with("Shape", &[&t.name], vec![int("start", axis), int("end", axis + 1)]);
        let scalar = self.list(&[]);
        Int::Computed(self.add("Reshape", &[&size, &scalar]))
    }

    /// The sizes of all axes.
    pub(super) fn shape(&mut self, t: &Tensor) -> Vec<Int> {
        (0..t.dims.len()).map(|axis| self.size_of(t, axis)).collect()
    }

    /// A tensor of one number, in the shape of sizes.
    pub(super) fn full(&mut self, sizes: &[Int], dtype: Dtype, value: f64) -> String {
        let shape = self.size_list(sizes);
        let number = self.number(dtype, value);
        if sizes.is_empty() { number } else { self.add("Expand", &[&number, &shape]) }
    }

    pub(super) fn reshape(&mut self, x: &str, sizes: &[Int]) -> String {
        let shape = self.size_list(sizes);
        let zero = sizes.iter().any(|s| s.known() == Some(0));
        let attributes = if zero { vec![int("allowzero", 1)] } else { vec![] };
        self.with("Reshape", &[x, &shape], attributes)
    }

    pub(super) fn transpose(&mut self, x: &str, perm: &[usize]) -> String {
        let perm: Vec<i64> = perm.iter().map(|p| *p as i64).collect();
        self.with("Transpose", &[x], vec![ints("perm", &perm)])
    }

    pub(super) fn unsqueeze(&mut self, x: &str, axes: &[i64]) -> String {
        let axes = self.list(axes);
        self.add("Unsqueeze", &[x, &axes])
    }

    pub(super) fn squeeze(&mut self, x: &str, axes: &[i64]) -> String {
        let axes = self.list(axes);
        self.add("Squeeze", &[x, &axes])
    }

    /// Reduces over axes; over all if there are none.
    pub(super) fn reduce(&mut self, f: &str, x: &str, axes: &[i64], keep: bool) -> String {
        let keep = vec![int("keepdims", keep.into())];
        if axes.is_empty() {
            return self.with(f, &[x], keep);
        }
        let axes = self.list(axes);
        self.with(f, &[x, &axes], keep)
    }
}

/// The metadata of a node that came from a call, in the words of PyTorch's exporter.
pub(super) fn call_entry(call: &str) -> StringStringEntryProto {
    let target = format!("call_function[target=torch.ops.aten.{call}");
    StringStringEntryProto {
        key: "pkg.torch.onnx.fx_node".into(),
        value: format!("%x : [num_users=1] = {target}, kwargs = {{}})"),
    }
}

/// A tensor of one number.
fn scalar(dtype: Dtype, value: f64) -> TensorProto {
    let mut tensor = TensorProto { data_type: dtype, ..TensorProto::default() };
    match dtype {
        F32 => tensor.float_data = vec![value as f32],
        F64 => tensor.double_data = vec![value],
        I64 => tensor.int64_data = vec![value as i64],
        F16 => tensor.raw_data = Some(Bytes::copy_from_slice(&f16::from_f64(value).to_le_bytes())),
        BF16 => {
            tensor.raw_data = Some(Bytes::copy_from_slice(&bf16::from_f64(value).to_le_bytes()))
        }
        BOOL => tensor.int32_data = vec![i32::from(value != 0.0)],
        12 | 13 => tensor.uint64_data = vec![value as u64],
        _ => tensor.int32_data = vec![value as i32],
    }
    tensor
}

pub(super) fn int(name: &str, i: i64) -> AttributeProto {
    AttributeProto { name: name.into(), i, r#type: 2, ..AttributeProto::default() }
}

pub(super) fn ints(name: &str, ints: &[i64]) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        ints: ints.to_vec(),
        r#type: 7,
        ..AttributeProto::default()
    }
}

pub(super) fn float(name: &str, f: f64) -> AttributeProto {
    AttributeProto { name: name.into(), f: f as f32, r#type: 1, ..AttributeProto::default() }
}

pub(super) fn text(name: &str, s: &str) -> AttributeProto {
    let s = Bytes::copy_from_slice(s.as_bytes());
    AttributeProto { name: name.into(), s, r#type: 3, ..AttributeProto::default() }
}
