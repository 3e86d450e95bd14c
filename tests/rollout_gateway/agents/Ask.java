import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Posts three bodies with Java's own client, which offers an upgrade to HTTP/2 with its first request. */
public class Ask {
  public static void main(String[] args) throws Exception {
    HttpClient client = HttpClient.newHttpClient();
    for (int number = 0; number < 3; number++) {
      HttpRequest request = HttpRequest.newBuilder(URI.create(args[0]))
          .POST(HttpRequest.BodyPublishers.ofString("body " + number))
          .build();
      HttpResponse<String> reply = client.send(request, HttpResponse.BodyHandlers.ofString());
      System.out.println(reply.statusCode() + " " + reply.body());
    }
  }
}
