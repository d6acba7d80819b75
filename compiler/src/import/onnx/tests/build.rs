//! Small ONNX models, built message by message, and their evaluation.

use crate::diagnostics::Report;
use crate::import::onnx::messages::*;
use crate::import::{ImportOptions, Imported};
use frit_ir::interpret::{self, Options};
use frit_ir::{Op, Tensor};
use prost::Message;
use prost::bytes::Bytes;
use std::collections::HashMap;
use std::path::Path;

/// A size of an input: a number or a name.
pub(super) enum Dim {
    N(i64),
    S(&'static str),
}

pub(super) fn input(name: &str, elem_type: i32, dims: &[Dim]) -> ValueInfoProto {
    let dim = dims
        .iter()
        .map(|d| match d {
            Dim::N(n) => DimensionProto { dim_value: Some(*n), dim_param: None },
            Dim::S(s) => DimensionProto { dim_value: None, dim_param: Some((*s).into()) },
        })
        .collect();
    let shape = Some(TensorShapeProto { dim });
    let tensor_type = Some(TensorTypeProto { elem_type, shape });
    ValueInfoProto { name: name.into(), r#type: Some(TypeProto { tensor_type }) }
}

pub(super) fn floats(name: &str, dims: &[i64], values: &[f32]) -> TensorProto {
    let (dims, float_data) = (dims.to_vec(), values.to_vec());
    TensorProto { name: name.into(), dims, data_type: 1, float_data, ..Default::default() }
}

pub(super) fn ints(name: &str, values: &[i64]) -> TensorProto {
    let raw = values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    TensorProto {
        name: name.into(),
        dims: vec![values.len() as i64],
        data_type: 7,
        raw_data: Some(Bytes::from(raw)),
        ..Default::default()
    }
}

pub(super) fn int(name: &str, i: i64) -> AttributeProto {
    AttributeProto { name: name.into(), i, r#type: 2, ..Default::default() }
}

pub(super) fn float(name: &str, f: f32) -> AttributeProto {
    AttributeProto { name: name.into(), f, r#type: 1, ..Default::default() }
}

pub(super) fn list(name: &str, ints: &[i64]) -> AttributeProto {
    AttributeProto { name: name.into(), ints: ints.to_vec(), r#type: 7, ..Default::default() }
}

pub(super) fn text(name: &str, s: &str) -> AttributeProto {
    let s = Bytes::from(s.to_string());
    AttributeProto { name: name.into(), s, r#type: 3, ..Default::default() }
}

pub(super) fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: outputs.iter().map(|s| s.to_string()).collect(),
        name: format!("n_{}", outputs.first().unwrap_or(&"")),
        op_type: op.into(),
        ..Default::default()
    }
}

impl NodeProto {
    pub(super) fn with(mut self, attributes: &[AttributeProto]) -> Self {
        self.attribute.extend_from_slice(attributes);
        self
    }
}

pub(super) fn model(
    inputs: Vec<ValueInfoProto>,
    initializer: Vec<TensorProto>,
    node: Vec<NodeProto>,
    outputs: &[&str],
) -> ModelProto {
    let output = outputs.iter().map(|o| input(o, 1, &[])).collect();
    let graph = GraphProto {
        name: "t".into(),
        input: inputs,
        initializer,
        node,
        output,
        ..Default::default()
    };
    ModelProto {
        ir_version: 8,
        graph: Some(graph),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 18 }],
        ..Default::default()
    }
}

pub(super) fn import(model: &ModelProto, options: &ImportOptions) -> Result<Imported, Report> {
    let bytes = Bytes::from(model.encode_to_vec());
    crate::import::onnx::import(bytes, "t", Path::new("/nonexistent/m.onnx"), options)
}

pub(super) fn bind(pairs: &[(&str, usize)]) -> ImportOptions {
    let binds = pairs.iter().map(|(k, v)| (k.to_string(), *v)).collect();
    ImportOptions { binds, ..Default::default() }
}

/// Outputs of an imported graph for these inputs; parameters come from its weights.
pub(super) fn run(imported: &Imported, feeds: &[(&str, Tensor)]) -> Vec<Tensor> {
    let mut all: HashMap<String, Tensor> = HashMap::new();
    for (name, value) in feeds {
        all.insert((*name).into(), value.clone());
    }
    for (_, node) in imported.graph.nodes() {
        if let Op::Param(p) = &node.op {
            let stored = imported.weights.get(&p.name).expect("a weight");
            let value = Tensor::from_bytes(stored.ty.clone(), stored.bytes()).expect("its bytes");
            all.insert(p.name.clone(), value);
        }
    }
    let outputs = interpret::run(&imported.graph, &all, Options::default());
    outputs.expect("the graph has a value").into_iter().map(|(_, t)| t).collect()
}

/// The one output of a model with one operator whose operands are inputs `x`, parameters or constants.
pub(super) fn eval(model: &ModelProto, feeds: &[(&str, Tensor)]) -> Tensor {
    let imported = import(model, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    run(&imported, feeds).remove(0)
}

/// The messages of a model that must be refused.
pub(super) fn refused(model: &ModelProto, options: &ImportOptions) -> String {
    let report = import(model, options).expect_err("must be refused");
    report.diagnostics.iter().map(|d| format!("{} ", d.code)).collect::<String>()
        + &report.to_string()
}
