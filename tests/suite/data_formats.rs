//! Parquet files, NumPy files and folders: they train as the same examples do in one `.safetensors`, and damaged ones are refused. Batches in
//! memory of which the labels are misplaced are warned of.

use crate::support::{Planned, file, plan};
use frit_runtime::data::{Batch, Element, Source};
use frit_runtime::run::{RunOptions, run};
use frit_runtime::trainer::{Trainer, TrainerOptions};
use parquet::basic::Compression;
use parquet::column::writer::ColumnWriter;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const PIXELS: usize = 64;
const EXAMPLES: usize = 24;

fn digits_plan(more: &[&str]) -> Planned {
    let loss = ["loss.kind=cross_entropy", "loss.logits=logits", "loss.labels=labels"];
    plan("examples/digits_mlp/model.json", 4, &[&loss, more].concat())
}

fn digits() -> (Vec<f32>, Vec<i64>) {
    let pixels = (0..EXAMPLES * PIXELS).map(|i| ((i * 37 + i / 11) % 17) as f32);
    let labels = (0..EXAMPLES).map(|i| ((i * 7) % 10) as i64);
    (pixels.collect(), labels.collect())
}

fn losses(planned: &Planned, data: impl Into<Source>) -> Result<Vec<u64>, String> {
    let options =
        RunOptions { steps: 7, data: data.into(), threads: Some(1), ..RunOptions::default() };
    let report = run(&planned.path(), &options).map_err(|e| e.to_string())?;
    Ok(report.losses.iter().map(|x| x.to_bits()).collect())
}

fn bytes<T: Copy, const N: usize>(values: &[T], to: fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|x| to(*x)).collect()
}

fn whole(path: &Path) -> PathBuf {
    let (pixels, labels) = digits();
    let (pixels, labels) = (bytes(&pixels, f32::to_le_bytes), bytes(&labels, i64::to_le_bytes));
    let views = [
        ("x", TensorView::new(Dtype::F32, vec![EXAMPLES, PIXELS], &pixels).expect("it fits")),
        ("labels", TensorView::new(Dtype::I64, vec![EXAMPLES], &labels).expect("it fits")),
    ];
    safetensors::serialize_to_file(views, None, path).expect("written");
    path.into()
}

/// What a column of a Parquet file holds: values, and for lists the levels of definition and repetition.
enum Column {
    Floats(Vec<f32>, Option<(Vec<i16>, Vec<i16>)>),
    Integers(Vec<i64>, Option<Vec<i16>>),
    Bytes(Vec<i32>),
}

/// A file with these columns in each of its row groups.
fn parquet(
    path: &Path,
    schema: &str,
    compression: Compression,
    groups: Vec<Vec<Column>>,
) -> PathBuf {
    let schema = Arc::new(parse_message_type(schema).expect("a schema"));
    let properties = WriterProperties::builder().set_compression(compression).build();
    let file = File::create(path).expect("a file");
    let mut file = SerializedFileWriter::new(file, schema, Arc::new(properties)).expect("a writer");
    for columns in groups {
        let mut group = file.next_row_group().expect("a group");
        for column in columns {
            let mut writer = group.next_column().expect("written").expect("a column");
            match (writer.untyped(), column) {
                (ColumnWriter::FloatColumnWriter(w), Column::Floats(values, levels)) => {
                    let (definitions, repetitions) = levels.unzip();
                    w.write_batch(&values, definitions.as_deref(), repetitions.as_deref())
                }
                (ColumnWriter::Int64ColumnWriter(w), Column::Integers(values, definitions)) => {
                    w.write_batch(&values, definitions.as_deref(), None)
                }
                (ColumnWriter::Int32ColumnWriter(w), Column::Bytes(values)) => {
                    w.write_batch(&values, None, None)
                }
                _ => panic!("another column"),
            }
            .expect("written");
            writer.close().expect("closed");
        }
        group.close().expect("closed");
    }
    file.close().expect("closed");
    path.into()
}

/// As Arrow writes it: every list and element may be missing.
const SCHEMA: &str = "message m {
    optional group x (LIST) { repeated group list { optional float element; } }
    optional int64 labels;
    required int32 note (UINT_8);
}";

/// Levels of lists of `size` values.
fn levels(values: usize, size: usize) -> Option<(Vec<i16>, Vec<i16>)> {
    let repetitions = (0..values).map(|i| i16::from(i % size != 0)).collect();
    Some((vec![3; values], repetitions))
}

fn group(examples: std::ops::Range<usize>) -> Vec<Column> {
    let (pixels, labels) = digits();
    let pixels = pixels[examples.start * PIXELS..examples.end * PIXELS].to_vec();
    let labels = labels[examples.clone()].to_vec();
    let n = examples.len();
    vec![
        Column::Floats(pixels, levels(n * PIXELS, PIXELS)),
        Column::Integers(labels, Some(vec![1; n])),
        Column::Bytes(vec![3; n]),
    ]
}

#[test]
fn parquet_files_train_as_tensors_do() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let one = whole(&at("whole.safetensors"));
    for settings in [&["data.shuffle=false"][..], &["data.shuffle=true", "sharding.ranks=2"]] {
        let planned = digits_plan(settings);
        let expected = losses(&planned, one.clone()).expect("it trains");
        for compression in [
            Compression::UNCOMPRESSED,
            Compression::SNAPPY,
            Compression::ZSTD(Default::default()),
            Compression::GZIP(Default::default()),
            Compression::LZ4_RAW,
        ] {
            let groups = vec![group(0..5), group(5..24)];
            let path = parquet(&at("digits.parquet"), SCHEMA, compression, groups);
            assert_eq!(losses(&planned, path).expect("it trains"), expected);
        }
        let shards = at("shards");
        std::fs::create_dir_all(shards.join("deeper")).expect("made");
        let plain = Compression::SNAPPY;
        parquet(&shards.join("a.parquet"), SCHEMA, plain, vec![group(0..7)]);
        parquet(&shards.join("deeper/0.parquet"), SCHEMA, plain, vec![group(7..24)]);
        assert_eq!(losses(&planned, shards).expect("it trains"), expected);
    }
}

#[test]
fn parquet_files_that_fit_no_tensor_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("digits.parquet");
    let planned = digits_plan(&[]);
    let refused = |groups: Vec<Vec<Column>>| {
        let path = parquet(&path, SCHEMA, Compression::SNAPPY, groups);
        losses(&planned, path).expect_err("it is refused")
    };
    let (pixels, labels) = digits();
    let with = |x: Column, labels: Column| vec![x, labels, Column::Bytes(vec![0; EXAMPLES])];
    // A list of 65 pixels, then one of 63.
    let (definitions, mut repetitions) = levels(pixels.len(), PIXELS).expect("levels");
    repetitions.swap(3 * PIXELS, 3 * PIXELS + 1);
    let x = Column::Floats(pixels.clone(), Some((definitions, repetitions)));
    let message = refused(vec![with(x, Column::Integers(labels.clone(), Some(vec![1; EXAMPLES])))]);
    assert!(message.contains("column `x`: row 2 does not have the length [64]"), "{message}");
    let mut there = vec![1; EXAMPLES];
    there[17] = 0;
    let x = Column::Floats(pixels.clone(), levels(pixels.len(), PIXELS));
    let message = refused(vec![with(x, Column::Integers(labels[1..].to_vec(), Some(there)))]);
    assert!(message.contains("column `labels`: row 17 has a missing value"), "{message}");
    let x = Column::Floats(pixels.clone(), levels(pixels.len(), 32));
    let twice = [labels.clone(), labels].concat();
    let both = vec![x, Column::Integers(twice, Some(vec![1; 48])), Column::Bytes(vec![0; 48])];
    let message = refused(vec![both]);
    assert!(message.contains("[48, 32]") && message.contains("f32[examples, 64]"), "{message}");
}

#[test]
fn damaged_parquet_files_are_refused_or_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("digits.parquet");
    let planned = digits_plan(&[]);
    parquet(&path, SCHEMA, Compression::SNAPPY, vec![group(0..EXAMPLES)]);
    let good = std::fs::read(&path).expect("read");
    let mut random = fastrand::Rng::with_seed(5);
    let mut refused = 0;
    for number in 0..300 {
        let mut bad = good.clone();
        match number % 3 {
            0 => bad.truncate(random.usize(..bad.len())),
            // The footer has the metadata.
            1 => bad[good.len() - 1 - random.usize(..400)] = random.u8(..),
            _ => bad[random.usize(..good.len())] ^= 1 << random.u32(..8),
        }
        std::fs::write(&path, &bad).expect("written");
        if let Err(message) = losses(&planned, path.clone()) {
            assert!(message.contains("digits.parquet"), "{message}");
            refused += 1;
        }
    }
    assert!(refused > 100, "only {refused}");
}

fn npy(path: &Path, descr: &str, shape: &str, elements: &[u8]) {
    let mut head = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    head += &" ".repeat((64 - (head.len() + 11) % 64) % 64);
    head.push('\n');
    let length = (head.len() as u16).to_le_bytes();
    let all = [b"\x93NUMPY\x01\x00", &length[..], head.as_bytes(), elements].concat();
    std::fs::write(path, all).expect("written");
}

#[test]
fn folders_have_one_kind_of_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let planned = digits_plan(&[]);
    let expected =
        losses(&planned, whole(&dir.path().join("whole.safetensors"))).expect("it trains");
    let (pixels, labels) = digits();
    let arrays = dir.path().join("arrays");
    let refused = |text: &str| {
        let message = losses(&planned, arrays.clone()).expect_err("it is refused");
        assert!(message.contains(text), "{message}");
    };
    std::fs::create_dir(&arrays).expect("made");
    refused("the folder has no .safetensors, .parquet, .npz, .bin or .npy file");
    npy(&arrays.join("x.npy"), "<f4", "24, 64", &bytes(&pixels, f32::to_le_bytes));
    refused("no tensor `labels`");
    npy(&arrays.join("labels.npy"), "<i8", "24,", &bytes(&labels, i64::to_le_bytes));
    assert_eq!(losses(&planned, arrays.clone()).expect("it trains"), expected);
    std::fs::write(arrays.join("more.bin"), "").expect("written");
    refused("the folder has .bin and .npy files; use a pattern, such as '*.bin'");
}

#[test]
fn arrays_of_tokens_are_windows_of_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let loss = ["loss.kind=cross_entropy", "loss.logits=logits", "loss.labels=labels"];
    let planned = plan("examples/char_gpt2/model.json", 2, &loss);
    let raw = std::fs::read(file("examples/char_gpt2/data.bin")).expect("tokens");
    let raw = &raw[..40_000];
    let bin = dir.path().join("tokens.bin");
    std::fs::write(&bin, raw).expect("written");
    let expected = losses(&planned, bin).expect("it trains");
    let ids: Vec<u16> = raw.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
    let path = dir.path().join("tokens.npy");
    let shape = format!("{},", ids.len());
    npy(&path, "<u2", &shape, raw);
    assert_eq!(losses(&planned, path.clone()).expect("it trains"), expected);
    npy(&path, "<i4", &shape, &bytes(&ids, |x| i32::from(x).to_le_bytes()));
    assert_eq!(losses(&planned, path.clone()).expect("it trains"), expected);
    npy(&path, "<f4", &shape, &bytes(&ids, |x| f32::from(x).to_le_bytes()));
    assert!(losses(&planned, path).expect_err("floats").contains("no tensor"));
}

/// Of a loader's batches the first is looked at: whether its labels are the next tokens.
#[test]
fn a_trainer_warns_once_of_labels_at_other_places_than_the_next() {
    let planned = plan("tests/museum/models/lm.json", 8, &["precision.compute=fp32"]);
    let token = |at: usize| (at * at + 3 * at) as i64 % 11;
    for (later, warnings) in [(0, 1), (1, 0), (2, 1)] {
        let options = TrainerOptions { threads: Some(1), ..TrainerOptions::default() };
        let trainer = Trainer::open(&planned.path(), options, &mut || ());
        let mut trainer = trainer.unwrap_or_else(|e| panic!("{e}"));
        let mut told = 0;
        for _ in 0..2 {
            let mut batch = Batch::default();
            for (name, by) in [("input_ids", 0), ("labels", later)] {
                let values = (0..8 * 6).map(|at| token(at / 6 * 9 + at % 6 + by));
                let bytes: Vec<u8> = values.flat_map(i64::to_le_bytes).collect();
                batch.add(name, Element::I64, vec![8, 6], bytes).expect("contiguous");
            }
            trainer.step(&batch, &mut || ()).unwrap_or_else(|e| panic!("{e}"));
            told += trainer.take_warnings().iter().filter(|w| w.contains("`input_ids`")).count();
        }
        assert_eq!(told, warnings, "labels of tokens {later} places later");
        trainer.close(&mut || ()).unwrap_or_else(|e| panic!("{e}"));
    }
}
