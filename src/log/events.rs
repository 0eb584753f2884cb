//! A TensorBoard event file. The framing and the messages are `tensorboard-rs`'s; the file handle
//! is ours, since the crate's own writers panic on I/O errors and share names within a second.

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use protobuf::{Message, RepeatedField};
use tensorboard_proto::event::{Event, SessionLog, SessionLog_SessionStatus};
use tensorboard_proto::summary::{
    Summary, Summary_Image, Summary_Value, SummaryMetadata, SummaryMetadata_PluginData,
};
use tensorboard_proto::tensor::TensorProto;
use tensorboard_proto::tensor_shape::{TensorShapeProto, TensorShapeProto_Dim};
use tensorboard_proto::types::DataType;
use tensorboard_rs::record_writer::RecordWriter;
use tensorboard_rs::summary;

use super::directory::RunDirectory;
use super::picture::Picture;
use crate::error::{Error, Result};

/// The number of buckets of a histogram.
const BUCKETS: usize = 30;

/// Writes one event file.
pub struct EventWriter {
    path: PathBuf,
    writer: RecordWriter<BufWriter<File>>,
}

impl EventWriter {
    /// Makes a new event file in a directory, whose name no other file there has.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn create(directory: &Path) -> Result<Self> {
        let process = std::process::id();
        let (path, file) = loop {
            // TensorBoard reads the files of a folder in the order of their names.
            let now = since_epoch();
            let (seconds, nanoseconds) = (now.as_secs(), now.subsec_nanos());
            let name =
                format!("events.out.tfevents.{seconds}.{nanoseconds:09}.gradprism.{process}");
            let path = directory.join(name);
            match File::create_new(&path) {
                Ok(file) => break (path, file),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io("write", &path)(error)),
            }
        };
        let mut events = Self { path, writer: RecordWriter::new(BufWriter::new(file)) };
        let mut version = Event::new();
        version.set_file_version("brain.Event:2".into());
        events.write(version)?;
        Ok(events)
    }

    /// Makes a new event file for a run that goes on at a step: what earlier files of the folder hold of
    /// this step and after, TensorBoard then leaves out.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn resume(directory: &Path, step: i64) -> Result<Self> {
        let mut events = Self::create(directory)?;
        let mut session = SessionLog::new();
        session.set_status(SessionLog_SessionStatus::START);
        let mut start = Event::new();
        start.set_step(step);
        start.set_session_log(session);
        events.write(start)?;
        Ok(events)
    }

    /// The event file of a run, which begins with the resolved configuration as text.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn of_run(directory: &RunDirectory, config: &str) -> Result<Self> {
        let mut events = Self::create(directory.path())?;
        events.text("config", 0, &format!("```yaml\n{config}\n```"))?;
        Ok(events)
    }

    /// A number; nothing if there is none, or it is not finite.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn scalar(&mut self, tag: &str, step: i64, value: impl Into<Option<f64>>) -> Result<()> {
        match value.into() {
            Some(value) if value.is_finite() => {
                self.summary(step, summary::scalar(tag, value as f32))
            }
            _ => Ok(()),
        }
    }

    /// A histogram of the finite values; nothing if there is none.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn histogram(&mut self, tag: &str, step: i64, values: &[f64]) -> Result<()> {
        let values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if values.is_empty() {
            return Ok(());
        }
        // One value, or many equal ones, need a bucket of some width.
        let width = ((high - low) / BUCKETS as f64).max(high.abs().max(1e-12) * 1e-9);
        let limits: Vec<f64> = (1..=BUCKETS).map(|index| low + width * index as f64).collect();
        let mut counts = vec![0.0; BUCKETS];
        for value in &values {
            let bucket = ((value - low) / width).floor() as usize;
            counts[bucket.min(BUCKETS - 1)] += 1.0;
        }
        let sum = values.iter().sum();
        let squares = values.iter().map(|value| value * value).sum();
        let count = values.len() as f64;
        self.summary(
            step,
            summary::histogram_raw(tag, low, high, count, sum, squares, &limits, &counts),
        )
    }

    /// A picture.
    ///
    /// # Errors
    /// If it cannot be encoded or written.
    pub fn image(&mut self, tag: &str, step: i64, picture: &Picture) -> Result<()> {
        let mut image = Summary_Image::new();
        image.set_width(picture.width() as i32);
        image.set_height(picture.height() as i32);
        image.set_colorspace(3);
        image.set_encoded_image_string(picture.to_png()?);
        let mut value = Summary_Value::new();
        value.set_tag(tag.into());
        value.set_image(image);
        self.values(step, value)
    }

    /// A text, shown as Markdown.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn text(&mut self, tag: &str, step: i64, text: &str) -> Result<()> {
        let mut plugin = SummaryMetadata_PluginData::new();
        plugin.set_plugin_name("text".into());
        let mut metadata = SummaryMetadata::new();
        metadata.set_plugin_data(plugin);
        let mut dimension = TensorShapeProto_Dim::new();
        dimension.set_size(1);
        let mut shape = TensorShapeProto::new();
        shape.set_dim(RepeatedField::from_vec(vec![dimension]));
        let mut tensor = TensorProto::new();
        tensor.set_dtype(DataType::DT_STRING);
        tensor.set_tensor_shape(shape);
        tensor.set_string_val(RepeatedField::from_vec(vec![text.as_bytes().to_vec()]));
        let mut value = Summary_Value::new();
        value.set_tag(tag.into());
        value.set_metadata(metadata);
        value.set_tensor(tensor);
        self.values(step, value)
    }

    /// Hands everything to the operating system.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn flush(&mut self) -> Result<()> {
        self.writer.flush().map_err(Error::io("write", &self.path))
    }

    fn values(&mut self, step: i64, value: Summary_Value) -> Result<()> {
        let mut summary = Summary::new();
        summary.set_value(RepeatedField::from_vec(vec![value]));
        self.summary(step, summary)
    }

    fn summary(&mut self, step: i64, summary: Summary) -> Result<()> {
        let mut event = Event::new();
        event.set_step(step);
        event.set_summary(summary);
        self.write(event)
    }

    fn write(&mut self, mut event: Event) -> Result<()> {
        event.set_wall_time(since_epoch().as_secs_f64());
        let bytes = event
            .write_to_bytes()
            .map_err(|error| Error::io("write", &self.path)(std::io::Error::other(error)))?;
        self.writer.write(&bytes).map_err(Error::io("write", &self.path))
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
