//! Event files of TensorBoard: one scalar per metric and step.
//!
//! A file is a sequence of records: length, masked CRC-32C of the length, a protobuf message `Event`, its masked CRC-32C. A run that
//! resumes begins a file of its own, whose first event says from which step on TensorBoard forgets what the files before it have.
//! Source: tensorflow/core/util/event.proto, tensorflow/core/lib/io/record_writer.cc.

use crate::RunError;
use crate::checkpoint::lock::{Run, wall_time};
use crate::files::Sink;
use crate::outputs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// A message of Protocol Buffers.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.0.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
    }

    fn integer(mut self, field: u64, n: u64) -> Self {
        self.varint(field << 3);
        self.varint(n);
        self
    }

    fn double(mut self, field: u64, x: f64) -> Self {
        self.varint(field << 3 | 1);
        self.0.extend(x.to_le_bytes());
        self
    }

    fn float(mut self, field: u64, x: f32) -> Self {
        self.varint(field << 3 | 5);
        self.0.extend(x.to_le_bytes());
        self
    }

    fn bytes(mut self, field: u64, content: &[u8]) -> Self {
        self.varint(field << 3 | 2);
        self.varint(content.len() as u64);
        self.0.extend(content);
        self
    }
}

/// An `Event` of a step.
fn event(wall_time: f64, step: usize) -> Message {
    Message::default().double(1, wall_time).integer(2, step as u64)
}

/// The version of the format, in the first event of a file.
fn version(wall_time: f64) -> Message {
    Message::default().double(1, wall_time).bytes(3, b"brain.Event:2")
}

/// That events of this step and later ones in earlier files no longer count: `SessionLog::START`.
fn start(wall_time: f64, step: usize) -> Message {
    event(wall_time, step).bytes(7, &Message::default().integer(1, 1).0)
}

/// A `Summary` of scalars.
fn summary(wall_time: f64, step: usize, values: &[(String, f64)]) -> Message {
    let mut summary = Message::default();
    for (tag, value) in values {
        let value = Message::default().bytes(1, tag.as_bytes()).float(2, *value as f32);
        summary = summary.bytes(1, &value.0);
    }
    event(wall_time, step).bytes(5, &summary.0)
}

/// Appends events to a new file in a folder.
pub(crate) struct Writer {
    pub(crate) path: PathBuf,
    file: Sink,
}

impl Writer {
    /// Creates a file in the folder, which is created too. TensorBoard forgets what earlier files there have from `step` on, at which
    /// the run begins or resumes.
    ///
    /// # Errors
    /// If the folder or the file cannot be written.
    pub(crate) fn create(folder: &Path, run: Run, step: usize) -> Result<Writer, RunError> {
        std::fs::create_dir_all(folder).map_err(|e| {
            let reason = outputs::reason_of_folder(folder, &e);
            RunError::Output { option: "--tensorboard", path: folder.into(), reason }
        })?;
        let now = wall_time();
        // TensorBoard reads files in the order of their names, which begin with the time.
        let microseconds = (now.fract() * 1e6) as u64;
        let name = format!("events.out.tfevents.{:010}.{microseconds:06}.frit.{run}", now as u64);
        let path = folder.join(name);
        let file = Sink::append(&path).map_err(RunError::io(&path))?;
        let mut writer = Writer { path, file };
        let first = [version(now), start(now, step)];
        let path = writer.path.clone();
        first.iter().try_for_each(|e| writer.put(e)).map_err(RunError::io(&path))?;
        Ok(writer)
    }

    /// Appends the values of a step.
    ///
    /// # Errors
    /// If the file system refuses.
    pub(crate) fn scalars(&mut self, step: usize, values: &[(String, f64)]) -> std::io::Result<()> {
        self.put(&summary(wall_time(), step, values))
    }

    fn put(&mut self, event: &Message) -> std::io::Result<()> {
        self.file.write_all(&record(&event.0))
    }
}

/// A record with this content.
fn record(content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), content, &masked(content)].concat()
}

/// The checksum as it is stored.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_those_of_tensorboard() {
        // What tensorboard.summary.writer.record_writer writes of the same events.
        let expected = "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c\
                        2100000000000000017becf609000000000000044010ac022a130a110a0a747261696e2f6c6f7373\
                        150000003f0cb83673";
        let values = [("train/loss".to_string(), 0.5)];
        let events = [version(1.5), summary(2.5, 300, &values)];
        let file: Vec<u8> = events.iter().flat_map(|e| record(&e.0)).collect();
        let hex: String = file.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, expected);
    }
}
