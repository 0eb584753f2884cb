//! Small pictures for TensorBoard: a scatter plot, drawn without any font of the system.

use embedded_graphics::mono_font::MonoTextStyle;
use embedded_graphics::mono_font::ascii::{FONT_7X13, FONT_9X15_BOLD};
use embedded_graphics::pixelcolor::Rgb888;
use embedded_graphics::prelude::*;
use embedded_graphics::primitives::{Circle, Line, PrimitiveStyle};
use embedded_graphics::text::{Alignment, Text};

use crate::error::{Error, Result};

/// An RGB picture.
#[derive(Clone, Debug)]
pub struct Picture {
    width: u32,
    height: u32,
    pixels: Vec<u8>,
}

impl Picture {
    /// A white picture.
    pub fn new(width: u32, height: u32) -> Self {
        Self { width, height, pixels: vec![255; width as usize * height as usize * 3] }
    }

    /// Its width in pixels.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Its height in pixels.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// The picture as a PNG file.
    ///
    /// # Errors
    /// If it cannot be encoded.
    pub fn to_png(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.width, self.height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        // Flat colours: the fast encoder is a quarter of a second faster in a debug build.
        encoder.set_compression(png::Compression::Fast);
        let encoded = encoder.write_header().and_then(|mut writer| {
            writer.write_image_data(&self.pixels)?;
            writer.finish()
        });
        encoded.map_err(|error| {
            Error::io("encode", std::path::Path::new("a picture"))(std::io::Error::other(error))
        })?;
        Ok(bytes)
    }
}

impl OriginDimensions for Picture {
    fn size(&self) -> Size {
        Size::new(self.width, self.height)
    }
}

impl DrawTarget for Picture {
    type Color = Rgb888;
    type Error = std::convert::Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(
        &mut self,
        pixels: I,
    ) -> std::result::Result<(), Self::Error> {
        for Pixel(point, color) in pixels {
            let (Ok(x), Ok(y)) = (u32::try_from(point.x), u32::try_from(point.y)) else { continue };
            if x < self.width && y < self.height {
                let at = (y as usize * self.width as usize + x as usize) * 3;
                self.pixels[at..at + 3].copy_from_slice(&[color.r(), color.g(), color.b()]);
            }
        }
        Ok(())
    }
}

/// One point of a scatter plot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mark {
    /// Its place.
    pub x: f64,
    /// Its place.
    pub y: f64,
    /// In the strong color.
    pub strong: bool,
    /// Filled or a ring.
    pub filled: bool,
}

/// A scatter plot with linear axes that hold 0.
#[derive(Clone, Debug)]
pub struct Scatter<'a> {
    /// Above the plot.
    pub title: &'a str,
    /// Below the plot: what strong and filled mean.
    pub legend: &'a str,
    /// The horizontal axis.
    pub x_label: &'a str,
    /// The vertical axis.
    pub y_label: &'a str,
    /// The points.
    pub marks: &'a [Mark],
}

pub(super) const WIDTH: i32 = 640;
pub(super) const HEIGHT: i32 = 480;
pub(super) const LEFT: i32 = 80;
const RIGHT: i32 = 20;
pub(super) const TOP: i32 = 50;
const BOTTOM: i32 = 80;
pub(super) const INK: Rgb888 = Rgb888::new(40, 40, 40);
const GRID: Rgb888 = Rgb888::new(225, 225, 225);
pub(super) const STRONG: Rgb888 = Rgb888::new(200, 60, 20);
pub(super) const PLAIN: Rgb888 = Rgb888::new(90, 130, 180);

impl Scatter<'_> {
    /// Draws the plot.
    pub fn draw(&self) -> Picture {
        let axes = Axes {
            title: self.title,
            legend: self.legend,
            x_label: self.x_label,
            y_label: self.y_label,
            x_ticks: ticks(self.marks.iter().map(|mark| mark.x)),
            y_ticks: ticks(self.marks.iter().map(|mark| mark.y)),
        };
        let mut picture = Picture::new(WIDTH as u32, HEIGHT as u32);
        // Drawing into memory cannot fail.
        let Ok(()) = axes.draw_on(&mut picture).and_then(|()| {
            self.marks.iter().try_for_each(|mark| draw_mark(&mut picture, &axes, mark))
        });
        picture
    }
}

/// Linear axes that hold 0 with their ticks, and what stands around them.
pub(super) struct Axes<'a> {
    pub title: &'a str,
    pub legend: &'a str,
    pub x_label: &'a str,
    pub y_label: &'a str,
    pub x_ticks: Vec<f64>,
    pub y_ticks: Vec<f64>,
}

/// What drawing into memory returns.
pub(super) type Drawn = std::result::Result<(), std::convert::Infallible>;

impl Axes<'_> {
    /// The smallest and the largest number of the horizontal axis.
    pub fn x_ends(&self) -> (f64, f64) {
        ends(&self.x_ticks)
    }

    /// The smallest and the largest number of the vertical axis.
    pub fn y_ends(&self) -> (f64, f64) {
        ends(&self.y_ticks)
    }

    /// The pixel of a point.
    pub fn place(&self, x: f64, y: f64) -> Point {
        let ((left, right), (low, high)) = (self.x_ends(), self.y_ends());
        let (across, up) = ((x - left) / (right - left), (y - low) / (high - low));
        Point::new(
            LEFT + (across * f64::from(WIDTH - LEFT - RIGHT)).round() as i32,
            HEIGHT - BOTTOM - (up * f64::from(HEIGHT - TOP - BOTTOM)).round() as i32,
        )
    }

    /// Draws grid, axes and texts.
    pub fn draw_on(&self, picture: &mut Picture) -> Drawn {
        let small = MonoTextStyle::new(&FONT_7X13, INK);
        let ((left, right), (low, high)) = (self.x_ends(), self.y_ends());
        for tick in &self.x_ticks {
            line(picture, self.place(*tick, low), self.place(*tick, high), GRID)?;
            let at = self.place(*tick, low) + Point::new(0, 16);
            Text::with_alignment(&label(*tick), at, small, Alignment::Center).draw(picture)?;
        }
        for tick in &self.y_ticks {
            line(picture, self.place(left, *tick), self.place(right, *tick), GRID)?;
            let at = self.place(left, *tick) + Point::new(-6, 4);
            Text::with_alignment(&label(*tick), at, small, Alignment::Right).draw(picture)?;
        }
        line(picture, self.place(left, 0.0), self.place(right, 0.0), INK)?;
        line(picture, self.place(0.0, low), self.place(0.0, high), INK)?;

        let middle = Point::new(WIDTH / 2, 22);
        let bold = MonoTextStyle::new(&FONT_9X15_BOLD, INK);
        Text::with_alignment(self.title, middle, bold, Alignment::Center).draw(picture)?;
        Text::new(self.y_label, Point::new(8, TOP - 12), small).draw(picture)?;
        let below = Point::new(WIDTH / 2, HEIGHT - BOTTOM + 36);
        Text::with_alignment(self.x_label, below, small, Alignment::Center).draw(picture)?;
        let legend = Point::new(WIDTH / 2, HEIGHT - 16);
        Text::with_alignment(self.legend, legend, small, Alignment::Center).draw(picture)?;
        Ok(())
    }
}

/// A mark in its place; none of what is not finite.
pub(super) fn draw_mark(picture: &mut Picture, axes: &Axes, mark: &Mark) -> Drawn {
    if !(mark.x.is_finite() && mark.y.is_finite()) {
        return Ok(());
    }
    let color = if mark.strong { STRONG } else { PLAIN };
    let style = if mark.filled {
        PrimitiveStyle::with_fill(color)
    } else {
        PrimitiveStyle::with_stroke(color, 2)
    };
    Circle::with_center(axes.place(mark.x, mark.y), 9).into_styled(style).draw(picture)
}

pub(super) fn line(picture: &mut Picture, from: Point, to: Point, color: Rgb888) -> Drawn {
    Line::new(from, to).into_styled(PrimitiveStyle::with_stroke(color, 1)).draw(picture)
}

/// The first and the last of at least two ticks.
fn ends(ticks: &[f64]) -> (f64, f64) {
    (ticks[0], ticks[ticks.len() - 1])
}

/// Round numbers, at least two, from the last at or below the smallest value or 0 up to the first at or
/// above the largest or 0.
pub(super) fn ticks(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let (low, high) = values
        .filter(|value| value.is_finite())
        .fold((0.0_f64, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
    if low == high {
        return vec![0.0, 1.0];
    }
    let rough = (high - low) / 5.0;
    let magnitude = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * magnitude)
        .find(|step| *step >= rough)
        .unwrap_or(rough);
    let (first, last) = ((low / step + 1e-9).floor() as i64, (high / step - 1e-9).ceil() as i64);
    (first..=last).map(|index| index as f64 * step).collect()
}

pub(super) fn label(value: f64) -> String {
    if value == 0.0 {
        "0".into()
    } else if (1e-3..1e5).contains(&value.abs()) {
        let text = format!("{value:.4}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        format!("{value:.1e}")
    }
}
